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
}

/** waiting: for the model to load; asking: sent, nothing heard yet; the last three are final. */
export type Progress = 'waiting' | 'asking' | 'streaming' | 'done' | 'stopped' | 'failed'

export interface Turn {
  id: string
  parent: string | null
  role: 'user' | 'assistant'
  text: string
  reasoning: string
  progress: Progress
  error: string
  finish: string // the server's finish_reason
  stats: Stats | null
}

export interface Conversation {
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

export const create = (system = '', sampling = unset()): Conversation => ({
  id: identifier(), title: '', updated: Date.now(), system, sampling, turns: [], leaf: null,
})

export const isRunning = (turn: Turn | undefined) => !!turn && ['waiting', 'asking', 'streaming'].includes(turn.progress)

/** Adds a turn below `parent` and shows it. */
export function append(conversation: Conversation, parent: string | null, role: Turn['role'], text: string): Turn {
  const id = identifier()
  conversation.turns.push({
    id, parent, role, text, reasoning: '', progress: role === 'user' ? 'done' : 'asking', error: '', finish: '', stats: null,
  })
  conversation.leaf = id
  if (!conversation.title) conversation.title = titled(text)
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

/** What the model is sent for the turns up to `leaf`. Neighbours of one role become one: many templates insist on it. */
export function messages(conversation: Conversation, leaf: string | null): { role: string; content: string }[] {
  const sent = conversation.system.trim() ? [{ role: 'system', content: conversation.system }] : []
  for (const turn of path(conversation, leaf)) {
    const content = parts(turn).text
    const last = sent.at(-1)
    if (!content) continue
    if (last?.role === turn.role) last.content += `\n\n${content}`
    else sent.push({ role: turn.role, content })
  }
  return sent
}

export function markdown(conversation: Conversation): string {
  const system = conversation.system.trim() ? `> ${conversation.system.trim().replaceAll('\n', '\n> ')}\n\n` : ''
  const turns = path(conversation).map((turn) => `### ${turn.role === 'user' ? 'You' : 'Model'}\n\n${parts(turn).text.trim()}\n`)
  return `# ${conversation.title}\n\n${system}${turns.join('\n')}`
}

/** Any record, from storage or from a file, as a conversation; null when it is none. Trusts no field. */
export function restore(record: unknown): Conversation | null {
  const from = (record ?? {}) as Record<string, unknown>
  if (typeof from.id !== 'string' || !Array.isArray(from.turns)) return null
  const turns = from.turns.map(restoreTurn).filter((turn) => turn !== null)
  const leaf = turns.find((turn) => turn.id === from.leaf) ?? turns.at(-1)
  return {
    ...create(string(from.system), restoreSampling(from.sampling)),
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

function restoreTurn(record: unknown): Turn | null {
  const from = (record ?? {}) as Record<string, unknown>
  if (typeof from.id !== 'string' || (from.role !== 'user' && from.role !== 'assistant')) return null
  const ended = ['done', 'stopped', 'failed'].includes(string(from.progress))
  const stats = from.stats as Partial<Stats> | null | undefined
  return {
    id: from.id, parent: string(from.parent) || null, role: from.role, text: string(from.text), reasoning: string(from.reasoning),
    progress: ended ? (from.progress as Progress) : 'failed',
    error: ended ? string(from.error) : 'The page was closed before the answer ended.',
    finish: string(from.finish),
    stats: stats && number(stats.tokens) !== null
      ? { firstToken: number(stats.firstToken) ?? 0, tokens: stats.tokens!, seconds: number(stats.seconds) ?? 0,
          promptTokens: number(stats.promptTokens), cachedTokens: number(stats.cachedTokens) }
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
