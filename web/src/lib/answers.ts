// Getting answers: one request per answer, streamed into its turn, stopped by closing the connection.
import { append, messages, path, type Conversation, type Stats, type Turn } from './conversation'
import { conversations } from './conversations.svelte'
import { server, ServerError } from './server.svelte'
import { events } from './stream'

interface Usage {
  prompt_tokens?: number
  completion_tokens?: number
  prompt_tokens_details?: { cached_tokens?: number } | null
}
interface Delta {
  content?: string | null
  reasoning_content?: string | null
  reasoning?: string | null
}
interface Chunk {
  choices?: { delta?: Delta; finish_reason?: string | null }[]
  usage?: Usage | null
  error?: { message?: string } | string
}

/** The screen follows at this pace however fast tokens come, and storage at a slower one. */
const SHOW_EVERY = 40
const SAVE_EVERY = 1000
const LOST = 'The connection was lost before the answer ended.'

const open = new Map<string, AbortController>()

export function send(conversation: Conversation, text: string) {
  const message = append(conversation, path(conversation).at(-1)?.id ?? null, 'user', text)
  conversations.keep(conversation)
  void answer(conversation, append(conversation, message.id, 'assistant', ''))
}

/** Says the user's `turn` differently, beside the first version. */
export function resend(conversation: Conversation, turn: Turn, text: string) {
  const message = append(conversation, turn.parent, 'user', text)
  void answer(conversation, append(conversation, message.id, 'assistant', ''))
}

/** Answers again beside `turn`, or in its place when it holds nothing. */
export function retry(conversation: Conversation, turn: Turn) {
  void answer(conversation, turn.text || turn.reasoning ? append(conversation, turn.parent, 'assistant', '') : turn)
}

/** Writes on where `turn` ended. */
export function resume(conversation: Conversation, turn: Turn) {
  void answer(conversation, turn, true)
}

export const stop = (turn: Turn) => open.get(turn.id)?.abort()

async function answer(conversation: Conversation, turn: Turn, extend = false) {
  const abort = new AbortController()
  const writer = new Writer(conversation, turn)
  open.set(turn.id, abort)
  Object.assign(turn, { error: '', finish: '', progress: server.state === 'ready' ? 'asking' : 'waiting' })
  conversation.updated = Date.now()
  try {
    await server.whenReady(abort.signal)
    turn.progress = 'asking'
    writer.begin()
    const body = JSON.stringify(request(conversation, turn, extend))
    const response = await server.request('v1/chat/completions', { method: 'POST', body, signal: abort.signal })
    if (!(await writer.follow(response))) throw new Error(LOST)
    turn.progress = 'done'
  } catch (error) {
    turn.progress = abort.signal.aborted ? 'stopped' : 'failed'
    if (!abort.signal.aborted) turn.error = reason(error)
    if (turn.error === LOST) void server.check()
  } finally {
    writer.end()
    open.delete(turn.id)
    await conversations.save(conversation)
  }
}

function request(conversation: Conversation, turn: Turn, extend: boolean) {
  const { stop, ...numbers } = conversation.sampling
  return {
    model: server.name,
    messages: messages(conversation, extend ? turn.id : turn.parent),
    stream: true,
    stream_options: { include_usage: true },
    ...Object.fromEntries(Object.entries(numbers).filter(([, value]) => value !== null)),
    ...(stop.length && { stop }),
    ...(extend && { continue_final_message: true, add_generation_prompt: false }),
  }
}

/** A fetch that fails below HTTP says only "Failed to fetch" or the like, in each browser's own words. */
function reason(error: unknown): string {
  if (error instanceof ServerError) return error.message
  return error instanceof TypeError ? LOST : error instanceof Error ? error.message : String(error)
}

/** Writes one answer into its turn, at the screen's pace, and times it. */
class Writer {
  #text = ''
  #reasoning = ''
  #timer: ReturnType<typeof setTimeout> | undefined
  #saved = 0
  #started = 0
  #first = 0
  #last = 0
  #chunks = 0
  #usage: Usage | null = null
  readonly #before: Stats | null

  constructor(readonly conversation: Conversation, readonly turn: Turn) {
    this.#before = turn.text ? turn.stats : null
  }

  begin() {
    this.#started = performance.now()
  }

  /** Reads the stream to its end; false when it broke off. */
  async follow(response: Response): Promise<boolean> {
    if (!response.body) return false
    for await (const data of events(response.body)) {
      if (data === '[DONE]') return true
      this.#take(JSON.parse(data) as Chunk)
    }
    return false
  }

  end() {
    clearTimeout(this.#timer)
    this.#show()
  }

  #take({ choices, usage, error }: Chunk) {
    if (error) throw new Error((typeof error === 'string' ? error : error.message) ?? 'The server gave up on this answer.')
    if (usage) this.#usage = usage
    const choice = choices?.[0]
    if (choice?.finish_reason) this.turn.finish = choice.finish_reason
    const text = choice?.delta?.content ?? ''
    const reasoning = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? ''
    if (!text && !reasoning) return
    this.#text += text
    this.#reasoning += reasoning
    this.#last = performance.now()
    this.#first ||= this.#last
    this.#chunks += 1
    this.#timer ??= setTimeout(() => this.#show(), SHOW_EVERY)
  }

  #show() {
    this.#timer = undefined
    const { turn } = this
    if (this.#first) {
      if (turn.progress === 'asking') turn.progress = 'streaming'
      turn.text += this.#text
      turn.reasoning += this.#reasoning
      this.#text = this.#reasoning = ''
      turn.stats = this.#stats()
    }
    if (performance.now() - this.#saved < SAVE_EVERY) return
    this.#saved = performance.now()
    void conversations.save(this.conversation)
  }

  #stats(): Stats {
    const before = this.#before
    return {
      firstToken: before?.firstToken ?? (this.#first - this.#started) / 1000,
      tokens: (before?.tokens ?? 0) + (this.#usage?.completion_tokens ?? this.#chunks),
      seconds: (before?.seconds ?? 0) + (this.#last - this.#first) / 1000,
      promptTokens: this.#usage?.prompt_tokens ?? before?.promptTokens ?? null,
      cachedTokens: this.#usage?.prompt_tokens_details?.cached_tokens ?? before?.cachedTokens ?? null,
    }
  }
}
