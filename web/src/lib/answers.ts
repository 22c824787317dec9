// Getting answers: one request per answer, streamed into its turn, stopped by closing the connection.
import { optionFields } from './options'
import { append, messages, path, type Attachment, type Conversation, type Stats, type Turn } from './conversation'
import { conversations } from './conversations.svelte'
import { loops } from './repetition'
import { server, ServerError } from './server.svelte'
import { events } from './stream'

interface Usage {
  prompt_tokens?: number
  completion_tokens?: number
  prompt_tokens_details?: { cached_tokens?: number } | null
}
interface CallDelta {
  index?: number
  id?: string | null
  function?: { name?: string | null; arguments?: string | null }
}
interface Delta {
  content?: string | null
  reasoning_content?: string | null
  reasoning?: string | null
  tool_calls?: CallDelta[] | null
}
interface Chunk {
  choices?: { delta?: Delta; finish_reason?: string | null }[]
  usage?: Usage | null
  error?: { message?: string } | string
}

/** The screen follows at this pace however fast tokens come, and storage at a slower one. */
const SHOW_EVERY = 40
const SAVE_EVERY = 1000
/** An answer longer than this is asked for piece by piece: the reader says "Continue". */
const DEFAULT_MAX_TOKENS = 1024
const REASONING_MAX_TOKENS = 4096 // a thought takes its share, and cannot be continued
export const defaultMaxTokens = () => (server.reasons ? REASONING_MAX_TOKENS : DEFAULT_MAX_TOKENS)
const LOST = 'The connection was lost before the answer ended.'

const open = new Map<string, AbortController>()

interface How {
  extend?: boolean // write on where the turn ended
  allowLoops?: boolean // let it repeat itself
}

export function send(conversation: Conversation, text: string, attachments: Attachment[] = []) {
  const message = append(conversation, path(conversation).at(-1)?.id ?? null, 'user', text, attachments)
  conversations.keep(conversation)
  void answer(conversation, append(conversation, message.id, 'assistant', ''))
}

/** Says the user's `turn` differently, beside the first version. */
export function resend(conversation: Conversation, turn: Turn, text: string) {
  const message = append(conversation, turn.parent, 'user', text, turn.attachments)
  void answer(conversation, append(conversation, message.id, 'assistant', ''))
}

/** Answers again beside `turn`, or in its place when it holds nothing. */
export function retry(conversation: Conversation, turn: Turn) {
  const isEmpty = !turn.text && !turn.reasoning && !turn.calls.length
  void answer(conversation, isEmpty ? turn : append(conversation, turn.parent, 'assistant', ''))
}

/** Writes on where `turn` ended. */
export function resume(conversation: Conversation, turn: Turn, allowLoops = false) {
  void answer(conversation, turn, { extend: true, allowLoops })
}

/** Goes on after the results of `turn`'s tool calls were entered. */
export function sendToolResults(conversation: Conversation, turn: Turn) {
  void answer(conversation, append(conversation, turn.id, 'assistant', ''))
}

export const stop = (turn: Turn) => open.get(turn.id)?.abort()

async function answer(conversation: Conversation, turn: Turn, { extend = false, allowLoops = false }: How = {}) {
  const abort = new AbortController()
  const writer = new Writer(conversation, turn, allowLoops ? null : () => abort.abort())
  open.set(turn.id, abort)
  Object.assign(turn, { error: '', finish: '', progress: server.state === 'ready' ? 'asking' : 'waiting' })
  conversation.updated = Date.now()
  try {
    await server.whenReady(abort.signal)
    turn.progress = 'asking'
    const body = JSON.stringify(request(conversation, turn, extend))
    writer.begin()
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

/** Sampling as the API takes it: what is not set is left to the server, but for the length. */
export function samplingFields({ stop, ...numbers }: Conversation['sampling']): Record<string, unknown> {
  const chosen = Object.entries(numbers).filter(([, value]) => value !== null)
  return { max_tokens: defaultMaxTokens(), ...Object.fromEntries(chosen), ...(stop.length && { stop }) }
}

function request(conversation: Conversation, turn: Turn, extend: boolean) {
  const options = optionFields(conversation)
  const hasResults = conversation.turns.some(({ id, calls }) => id === turn.parent && calls.length > 0)
  if (hasResults && options.tool_choice === 'required') delete options.tool_choice // or it would call again and again
  turn.json = 'response_format' in options
  return {
    model: server.name,
    messages: messages(conversation, extend ? turn.id : turn.parent),
    stream: true,
    // Usage with every event, so that an answer that is stopped knows its size.
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...samplingFields(conversation.sampling),
    ...options,
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
  #written = 0 // characters of this request, for the repetition check
  #thinking = 0 // when reasoning began
  #timer: ReturnType<typeof setTimeout> | undefined
  #saved = 0
  #started = 0
  #first = 0
  #last = 0
  #chunks = 0
  #usage: Usage | null = null
  readonly #before: Stats | null

  /** `giveUp` ends an answer that only repeats itself. */
  constructor(readonly conversation: Conversation, readonly turn: Turn, readonly giveUp: (() => void) | null) {
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
    if (this.#thinking && this.#last) this.turn.thought ??= (this.#last - this.#thinking) / 1000
    this.#show()
  }

  #take({ choices, usage, error }: Chunk) {
    if (error) throw new Error((typeof error === 'string' ? error : error.message) ?? 'The server gave up on this answer.')
    if (usage) this.#usage = usage
    const choice = choices?.[0]
    if (choice?.finish_reason) this.turn.finish = choice.finish_reason
    const text = choice?.delta?.content ?? ''
    const reasoning = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? ''
    const calls = choice?.delta?.tool_calls ?? []
    if (!text && !reasoning && !calls.length) return
    this.#last = performance.now()
    this.#first ||= this.#last
    this.#chunks += 1
    this.#text += text
    this.#reasoning += reasoning
    if (reasoning) this.#thinking ||= this.#last
    else if (this.#thinking) this.turn.thought ??= (this.#last - this.#thinking) / 1000
    for (const call of calls) this.#call(call)
    this.#timer ??= setTimeout(() => this.#show(), SHOW_EVERY)
  }

  /** A call's first piece names it, the others add to its arguments. */
  #call({ index = 0, id, function: piece }: CallDelta) {
    const { calls } = this.turn
    while (calls.length <= index) calls.push({ id: '', name: '', arguments: '', result: null })
    const call = calls[index]!
    call.id ||= id ?? ''
    call.name ||= piece?.name ?? ''
    call.arguments += piece?.arguments ?? ''
  }

  #show() {
    this.#timer = undefined
    const { turn } = this
    if (this.#first) {
      if (turn.progress === 'asking') turn.progress = 'streaming'
      this.#written += this.#text.length + this.#reasoning.length
      turn.text += this.#text
      turn.reasoning += this.#reasoning
      this.#text = this.#reasoning = ''
      turn.stats = this.#stats()
      if (turn.progress === 'streaming') this.#watch()
    }
    if (performance.now() - this.#saved < SAVE_EVERY) return
    this.#saved = performance.now()
    void conversations.save(this.conversation)
  }

  #watch() {
    const { turn } = this
    const text = (turn.text || turn.reasoning).slice(-this.#written)
    if (!this.giveUp || !loops(text)) return
    turn.finish = 'repetition'
    this.giveUp()
  }

  #stats(): Stats {
    const before = this.#before
    return {
      firstToken: before?.firstToken ?? (this.#first - this.#started) / 1000,
      tokens: (before?.tokens ?? 0) + (this.#usage?.completion_tokens ?? this.#chunks),
      seconds: (before?.seconds ?? 0) + (this.#last - this.#first) / 1000,
      promptTokens: this.#usage?.prompt_tokens ?? before?.promptTokens ?? null,
      cachedTokens: this.#usage?.prompt_tokens_details?.cached_tokens ?? before?.cachedTokens ?? null,
      contextTokens: this.#usage?.prompt_tokens ? this.#usage.prompt_tokens + (this.#usage.completion_tokens ?? 0) : null,
    }
  }
}
