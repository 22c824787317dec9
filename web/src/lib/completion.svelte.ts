// A text that the model continues: for base models, which know no chat, and for whoever wants to see them write.
import { samplingFields } from './answers'
import { remembered } from './browser'
import { create, restoreSampling, type Conversation } from './conversation'
import { loops } from './repetition'
import { server } from './server.svelte'
import { events } from './stream'

interface Chunk {
  choices?: { text?: string; finish_reason?: string | null }[]
  usage?: { prompt_tokens?: number; completion_tokens?: number } | null
  error?: { message?: string } | string
}

const stored = remembered('completion')

class Completion {
  text = $state('')
  running = $state(false)
  error = $state('')
  finish = $state('')
  tokens = $state<number | null>(null)
  /** The text before each continuation, for Undo. */
  before = $state.raw<string[]>([])
  /** Holds the sampling; a conversation, because the settings are made for one. */
  settings = $state<Conversation>(create())
  #abort: AbortController | null = null

  constructor() {
    try {
      const kept = JSON.parse(stored.get() ?? '{}')
      if (typeof kept.text === 'string') this.text = kept.text
      this.settings.sampling = restoreSampling(kept.sampling)
    } catch {
      // What was kept is not ours: begin with nothing.
    }
  }

  keep() {
    stored.set(JSON.stringify({ text: this.text, sampling: this.settings.sampling }))
  }

  stop() {
    this.#abort?.abort()
  }

  undo() {
    this.text = this.before.at(-1) ?? this.text
    this.before = this.before.slice(0, -1)
    this.finish = this.error = ''
    this.keep()
  }

  async run() {
    if (this.running || !this.text) return
    const abort = (this.#abort = new AbortController())
    const start = this.text.length
    this.before = [...this.before, this.text]
    Object.assign(this, { running: true, error: '', finish: '' })
    try {
      await server.whenReady(abort.signal)
      const body = JSON.stringify({
        model: server.name, prompt: this.text, stream: true,
        stream_options: { include_usage: true, continuous_usage_stats: true }, ...samplingFields(this.settings.sampling),
      })
      const response = await server.request('v1/completions', { method: 'POST', body, signal: abort.signal })
      if (!(await this.#follow(response, start))) this.error = 'The connection was lost before the text ended.'
    } catch (error) {
      if (!abort.signal.aborted) this.error = error instanceof Error ? error.message : String(error)
      else this.finish ||= 'stopped'
    } finally {
      this.running = false
      this.keep()
    }
  }

  async #follow(response: Response, start: number): Promise<boolean> {
    for await (const data of events(response.body!)) {
      if (data === '[DONE]') return true
      const { choices, usage, error } = JSON.parse(data) as Chunk
      if (error) throw new Error((typeof error === 'string' ? error : error.message) ?? 'The server gave up on this text.')
      this.text += choices?.[0]?.text ?? ''
      this.finish = choices?.[0]?.finish_reason ?? this.finish
      if (usage) this.tokens = (usage.prompt_tokens ?? 0) + (usage.completion_tokens ?? 0)
      if (!loops(this.text.slice(start))) continue
      this.finish = 'repetition'
      this.stop()
    }
    return false
  }
}

export const completion = new Completion()
