// Full-text search over the reader's conversations: every word must occur, in a title or in anything that was said.
import { parts, type Conversation, type Turn } from './conversation'

export interface Hit {
  conversation: Conversation
  turn: Turn | null // where the first word was found; null: in the title
  before: string
  match: string
  after: string
}

const AROUND = 36 // characters of context on the left; the right is cut by the screen
const KEPT = 160

export function search(conversations: Conversation[], query: string): Hit[] {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean)
  if (!words.length) return []
  return conversations.map((conversation) => find(conversation, words)).filter((hit) => hit !== null)
}

function find(conversation: Conversation, words: string[]): Hit | null {
  const texts = conversation.turns.map((turn): [Turn, string] => [turn, content(turn)])
  const everything = [conversation.title, ...texts.map(([, text]) => text)].join('\n').toLowerCase()
  if (!words.every((word) => everything.includes(word))) return null
  const found = texts.findLast(([, text]) => text.toLowerCase().includes(words[0]!))
  if (!found) return { conversation, turn: null, before: '', match: '', after: '' }
  const [turn, text] = found
  const at = text.toLowerCase().indexOf(words[0]!)
  const flat = (piece: string) => piece.replace(/\s+/g, ' ')
  return {
    conversation, turn,
    before: (at > AROUND ? '…' : '') + flat(text.slice(Math.max(0, at - AROUND), at)),
    match: text.slice(at, at + words[0]!.length),
    after: flat(text.slice(at + words[0]!.length, at + KEPT)),
  }
}

function content(turn: Turn): string {
  const files = turn.attachments.flatMap((file) => [file.name, file.text])
  const calls = turn.calls.flatMap((call) => [call.name, call.arguments, call.result ?? ''])
  return [parts(turn).text, ...files, ...calls].filter(Boolean).join('\n')
}
