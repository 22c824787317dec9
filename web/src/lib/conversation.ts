// What a conversation is: a tree of turns, of which one path is shown. Retrying an answer or editing a message grows a
// sibling, so nothing said is ever lost. Plain data and pure functions: no storage, no network, no reactivity.
import { identifier } from './browser'

export interface Sampling {
  temperature: number | null
  top_p: number | null
  top_k: number | null
  min_p: number | null
  repetition_penalty: number | null
  max_tokens: number | null
  seed: number | null
  stop: string[]
}

export interface Stats {
  firstToken: number // seconds from sending to the first token
  tokens: number
  seconds: number // from the first token to the last
  promptTokens: number | null
  cachedTokens: number | null
  contextTokens: number | null // prompt and output of the last request: what the conversation takes of the context
}

/** A text file that goes with a message. */
export interface Attachment {
  name: string
  text: string
  tokens: number | null // null: not counted yet
}

export interface ToolCall {
  id: string
  name: string
  arguments: string // JSON, perhaps unfinished
  result: string | null // what the reader says the tool returned
}

/** What a conversation asks for beside sampling; the two texts are JSON as the reader wrote it. */
export interface ChatOptions {
  tools: string
  toolChoice: 'auto' | 'required' | 'none'
  schema: string
  thinking: 'default' | 'on' | 'off'
}

/** waiting: for the model to load; asking: sent, nothing heard yet; the last three are final. */
export type Progress = 'waiting' | 'asking' | 'streaming' | 'done' | 'stopped' | 'failed'

export interface Turn {
  id: string
  parent: string | null
  role: 'user' | 'assistant'
  text: string
  attachments: Attachment[]
  reasoning: string
  thought: number | null // seconds the reasoning took
  calls: ToolCall[]
  json: boolean // the answer was asked for as JSON
  progress: Progress
  error: string
  finish: string // the server's finish_reason, or 'repetition' when this page stopped a loop
  stats: Stats | null
}

export interface Conversation extends ChatOptions {
  id: string
  title: string
  updated: number
  system: string
  sampling: Sampling
  turns: Turn[]
  leaf: string | null
}

/** null is "what the server does by default". */
export const unset = (): Sampling => ({
  temperature: null, top_p: null, top_k: null, min_p: null, repetition_penalty: null, max_tokens: null, seed: null, stop: [],
})

export const defaultOptions = (): ChatOptions => ({ tools: '', toolChoice: 'auto', schema: '', thinking: 'default' })

export const create = (system = '', sampling = unset(), options = defaultOptions()): Conversation => ({
  id: identifier(), title: '', updated: Date.now(), system, sampling, ...options, turns: [], leaf: null,
})

export const isRunning = (turn: Turn | undefined) => !!turn && ['waiting', 'asking', 'streaming'].includes(turn.progress)

/** Adds a turn below `parent` and shows it. */
export function append(conversation: Conversation, parent: string | null, role: Turn['role'], text: string, attachments: Attachment[] = []): Turn {
  const id = identifier()
  conversation.turns.push({
    id, parent, role, text, attachments, reasoning: '', thought: null, calls: [], json: false,
    progress: role === 'user' ? 'done' : 'asking', error: '', finish: '', stats: null,
  })
  conversation.leaf = id
  if (!conversation.title) conversation.title = titled(text || attachments[0]?.name || '')
  return conversation.turns.at(-1)! // read back: a reactive array hands out its own view of it
}

const titled = (text: string) => {
  const line = text.trim().split('\n', 1)[0] ?? ''
  return line.length > 60 ? `${line.slice(0, 58).trimEnd()}…` : line
}

/** The turns shown, first to last. */
export function path(conversation: Conversation, leaf = conversation.leaf): Turn[] {
  const byId = new Map(conversation.turns.map((turn) => [turn.id, turn]))
  const turns: Turn[] = []
  for (let turn = byId.get(leaf ?? ''); turn; turn = byId.get(turn.parent ?? '')) turns.unshift(turn)
  return turns
}

export const siblings = (conversation: Conversation, turn: Turn) =>
  conversation.turns.filter((other) => other.parent === turn.parent && other.role === turn.role)

/** Shows `turn` and, below it, the latest of what followed. */
export function show(conversation: Conversation, turn: Turn) {
  let leaf = turn
  for (let next: Turn | undefined = turn; next; next = conversation.turns.findLast((other) => other.parent === leaf.id)) leaf = next
  conversation.leaf = leaf.id
}

/** Some models think aloud first, between tags; servers that know this send the thought apart. */
export function parts(turn: Turn): { reasoning: string; text: string; thinking: boolean } {
  const match = /^\s*<think>([\s\S]*?)(<\/think>\s*|$)/.exec(turn.text)
  const text = match ? turn.text.slice(match[0].length) : turn.text
  const reasoning = (turn.reasoning + (match?.[1] ?? '')).trim()
  return { reasoning, text, thinking: !!reasoning && !text }
}

/** A message in OpenAI's form. */
export interface Message {
  role: 'system' | 'user' | 'assistant' | 'tool'
  content: string | { type: 'text'; text: string }[] | null
  reasoning_content?: string
  tool_calls?: { id: string; type: 'function'; function: { name: string; arguments: string } }[]
  tool_call_id?: string
}

const NO_RESULT = 'The user gave no result.'

/** What the model is sent for the turns up to `leaf`. Neighbours of one role become one: many templates insist on it. */
export function messages(conversation: Conversation, leaf: string | null): Message[] {
  const sent: Message[] = conversation.system.trim() ? [{ role: 'system', content: conversation.system }] : []
  for (const turn of path(conversation, leaf)) {
    const { text, reasoning } = parts(turn)
    const texts = [...turn.attachments.map((file) => `${attached(file)}\n\n`), text].filter(Boolean) // some templates join parts with nothing
    if (turn.calls.length) {
      sent.push({
        role: 'assistant', content: text || null, ...(reasoning && { reasoning_content: reasoning }),
        tool_calls: turn.calls.map(({ id, name, arguments: given }) => ({ id, type: 'function', function: { name, arguments: given } })),
      })
      for (const { id, result } of turn.calls) sent.push({ role: 'tool', tool_call_id: id, content: result ?? NO_RESULT })
    } else if (texts.length) add(sent, turn.role, texts)
  }
  return sent
}

function add(sent: Message[], role: Turn['role'], texts: string[]) {
  const last = sent.at(-1)
  if (last?.role !== role || last.tool_calls) sent.push({ role, content: joined(texts) })
  else if (typeof last.content === 'string' && texts.length === 1) last.content += `\n\n${texts[0]}`
  else last.content = [...listed(last.content ?? ''), ...listed(joined(texts))]
}

const listed = (content: NonNullable<Message['content']>) => (typeof content === 'string' ? [{ type: 'text' as const, text: content }] : content)
const joined = (texts: string[]) => (texts.length === 1 ? texts[0]! : texts.map((text) => ({ type: 'text' as const, text })))

/** A file as the model reads it: its name, then its text between fences that the text does not contain. */
function attached({ name, text }: Attachment): string {
  const longest = Math.max(2, ...(text.match(/^`{3,}/gm) ?? []).map((fence) => fence.length))
  const fence = '`'.repeat(longest + 1)
  return `File ${name}:\n${fence}\n${text.replace(/\n$/, '')}\n${fence}`
}

export function markdown(conversation: Conversation): string {
  const system = conversation.system.trim() ? `> ${conversation.system.trim().replaceAll('\n', '\n> ')}\n\n` : ''
  const turns = path(conversation).map((turn) => `### ${turn.role === 'user' ? 'You' : 'Model'}\n\n${[...turn.attachments.map(attached), parts(turn).text.trim(), ...turn.calls.map(called)].filter(Boolean).join('\n\n')}\n`)
  return `# ${conversation.title}\n\n${system}${turns.join('\n')}`
}

const called = ({ name, arguments: given, result }: ToolCall) =>
  `Called \`${name}\` with \`${given}\`${result === null ? '' : `, which returned:\n\n${result}`}`

/** Any record, from storage or from a file, as a conversation; null when it is none. Trusts no field. */
export function restore(record: unknown): Conversation | null {
  const from = (record ?? {}) as Record<string, unknown>
  if (typeof from.id !== 'string' || !Array.isArray(from.turns)) return null
  const turns = from.turns.map(restoreTurn).filter((turn) => turn !== null)
  const leaf = turns.find((turn) => turn.id === from.leaf) ?? turns.at(-1)
  return {
    ...create(string(from.system), restoreSampling(from.sampling), restoreOptions(from)),
    id: from.id,
    title: string(from.title) || 'Untitled',
    updated: number(from.updated) ?? Date.now(),
    turns: orderly(turns),
    leaf: leaf?.id ?? null,
  }
}

const string = (value: unknown) => (typeof value === 'string' ? value : '')
const number = (value: unknown) => (typeof value === 'number' && Number.isFinite(value) ? value : null)

export function restoreSampling(record: unknown): Sampling {
  const from = (record ?? {}) as Record<string, unknown>
  const sampling = unset()
  for (const name of Object.keys(sampling) as (keyof Sampling)[]) if (name !== 'stop') sampling[name] = number(from[name])
  if (Array.isArray(from.stop)) sampling.stop = from.stop.filter((text) => typeof text === 'string')
  return sampling
}

export function restoreOptions(record: unknown): ChatOptions {
  const from = (record ?? {}) as Record<string, unknown>
  const choice = (['auto', 'required', 'none'] as const).find((name) => name === from.toolChoice) ?? 'auto'
  const thinking = (['default', 'on', 'off'] as const).find((name) => name === from.thinking) ?? 'default'
  return { tools: string(from.tools), toolChoice: choice, schema: string(from.schema), thinking }
}

const records = (value: unknown) => (Array.isArray(value) ? value : []) as Record<string, unknown>[]

function restoreTurn(record: unknown): Turn | null {
  const from = (record ?? {}) as Record<string, unknown>
  if (typeof from.id !== 'string' || (from.role !== 'user' && from.role !== 'assistant')) return null
  const ended = ['done', 'stopped', 'failed'].includes(string(from.progress))
  const stats = from.stats as Partial<Stats> | null | undefined
  return {
    id: from.id, parent: string(from.parent) || null, role: from.role, text: string(from.text), reasoning: string(from.reasoning),
    attachments: records(from.attachments).map((file) => ({ name: string(file?.name), text: string(file?.text), tokens: number(file?.tokens) })),
    calls: records(from.calls).map((call) => ({
      id: string(call?.id), name: string(call?.name), arguments: string(call?.arguments), result: call?.result == null ? null : string(call.result),
    })),
    thought: number(from.thought), json: from.json === true,
    progress: ended ? (from.progress as Progress) : 'failed',
    error: ended ? string(from.error) : 'The page was closed before the answer ended.',
    finish: string(from.finish),
    stats: stats && number(stats.tokens) !== null
      ? { firstToken: number(stats.firstToken) ?? 0, tokens: stats.tokens!, seconds: number(stats.seconds) ?? 0,
          promptTokens: number(stats.promptTokens), cachedTokens: number(stats.cachedTokens),
          contextTokens: number(stats.contextTokens) }
      : null,
  }
}

/** Parents come before their children, which makes every path finite; a parent that is missing or later is dropped. */
function orderly(turns: Turn[]): Turn[] {
  const seen = new Set<string>()
  return turns.filter((turn) => {
    if (seen.has(turn.id)) return false
    if (turn.parent && !seen.has(turn.parent)) turn.parent = null
    return seen.add(turn.id)
  })
}
