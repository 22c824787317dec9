// Text files for a message: read, checked, and counted in the model's own tokens.
import type { Attachment } from './conversation'
import { server } from './server.svelte'

/** A pasted text of more characters becomes a file: the message stays readable. */
export const LONG_PASTE = 4000
const MOST_BYTES = 4_000_000 // a guess at "surely not for a prompt", before anything is read
const SHARE = 0.8 // of the context that attached files may take together

export async function read(file: File): Promise<Attachment> {
  const name = file.name || 'pasted.txt'
  if (file.size > MOST_BYTES) throw new Error(`${name} is too large: at most ${MOST_BYTES / 1e6} MB of text can be attached.`)
  const bytes = await file.arrayBuffer()
  try {
    const text = new TextDecoder('utf-8', { fatal: true }).decode(bytes)
    if (text.includes('\0')) throw new TypeError('binary')
    if (!text.trim()) throw new RangeError(`${name} is empty.`)
    return { name, text, tokens: null }
  } catch (error) {
    if (error instanceof RangeError) throw error
    throw new Error(`${name} is not a text file. Only text can be attached.`)
  }
}

/** The tokens of `text`; about, where the server cannot count now. */
export async function count(text: string): Promise<number> {
  try {
    const body = JSON.stringify({ model: server.name, prompt: text, add_special_tokens: false })
    const { count } = await server.json<{ count: number }>('tokenize', { method: 'POST', body })
    return count
  } catch {
    return Math.ceil(text.length / 4)
  }
}

/** Why these files cannot be sent together; empty when they can. */
export function tooMuch(files: Attachment[], context: number | null): string {
  const limit = context && Math.floor(context * SHARE)
  const total = files.reduce((sum, file) => sum + (file.tokens ?? 0), 0)
  if (!limit || total <= limit) return ''
  return `The files have ${total.toLocaleString('en')} tokens; at most ${limit.toLocaleString('en')} fit beside an answer in this model’s context.`
}
