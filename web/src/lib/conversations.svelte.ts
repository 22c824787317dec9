// The reader's conversations: loaded once, kept in this browser, shared between its tabs.
import { identifier, remembered } from './browser'
import { create, isRunning, path, restore, restoreOptions, restoreSampling, show, type Conversation, type Turn } from './conversation'
import * as storage from './storage'

const storedDefaults = remembered('defaults')

class Conversations {
  all = $state<Conversation[]>([])
  /** The one on screen; a new one joins `all` with its first message. */
  current = $state<Conversation>(this.#fresh())
  loaded = $state(false)
  /** The turn a search led to; the view scrolls there. */
  revealed = $state<string | null>(null)
  sorted = $derived(this.all.toSorted((a, b) => b.updated - a.updated))
  /** Whether an answer is being written in the conversation on screen. */
  running = $derived(path(this.current).find(isRunning) ?? null)
  #tabs = new BroadcastChannel('bloomery')

  async load() {
    const stored = (await storage.readAll()).map(restore).filter((conversation) => conversation !== null)
    const started = new Set(this.all.map((conversation) => conversation.id)) // while storage was being read
    this.all = [...stored.filter((conversation) => !started.has(conversation.id)), ...this.all]
    this.loaded = true
    this.#tabs.onmessage = ({ data }) => this.#reload(String(data))
  }

  open(id: string | null) {
    const found = this.all.find((conversation) => conversation.id === id)
    if (found) this.current = found
    else if (this.current.turns.length) this.current = this.#fresh()
  }

  /** The conversation's reactive self, listed and saved from now on. */
  keep(conversation: Conversation) {
    if (!this.all.some((other) => other.id === conversation.id)) this.all.push(conversation)
    void this.save(conversation)
  }

  async save(conversation: Conversation) {
    if (!this.all.some((other) => other.id === conversation.id)) return // a draft, or deleted meanwhile
    await storage.write($state.snapshot(conversation))
    this.#tabs.postMessage(conversation.id)
  }

  async remove(conversation: Conversation) {
    this.all = this.all.filter((other) => other.id !== conversation.id)
    await storage.erase(conversation.id)
    this.#tabs.postMessage(conversation.id)
  }

  /** Everything, or one, as a file's text. */
  exported(chosen: Conversation[] = this.all): string {
    return JSON.stringify({ format: 'bloomery-conversations', version: 1, conversations: $state.snapshot(chosen) }, null, 1)
  }

  /** Adds what a file holds, never over what is here, and says how many there were. */
  imported(text: string): number {
    const found = (JSON.parse(text).conversations as unknown[]).map(restore).filter((conversation) => conversation !== null)
    for (const conversation of found) {
      if (this.all.some((other) => other.id === conversation.id)) conversation.id = identifier()
      this.keep(conversation)
    }
    return found.length
  }

  /** New conversations begin with this one's system prompt, sampling, tools and schema. */
  setDefaults({ system, sampling, tools, toolChoice, schema, thinking }: Conversation) {
    storedDefaults.set(JSON.stringify({ system, sampling, tools, toolChoice, schema, thinking }))
  }

  /** Shows a conversation at `turn`, on whichever path it lies. */
  reveal(conversation: Conversation, turn: Turn | null) {
    this.current = conversation
    if (turn && !path(conversation).some((other) => other.id === turn.id)) show(conversation, turn)
    this.revealed = turn?.id ?? null
  }

  #fresh(): Conversation {
    try {
      const kept = JSON.parse(storedDefaults.get() ?? '{}')
      return create(typeof kept.system === 'string' ? kept.system : '', restoreSampling(kept.sampling), restoreOptions(kept))
    } catch {
      return create()
    }
  }

  /** Another tab changed a conversation: take its version, unless an answer is being written into ours. */
  async #reload(id: string) {
    const index = this.all.findIndex((conversation) => conversation.id === id)
    const mine = this.all[index]
    if (mine?.turns.some(isRunning)) return
    const record = restore(await storage.read(id))
    const shown = this.current.id === id
    if (!record) this.all = this.all.filter((conversation) => conversation.id !== id)
    else if (mine) this.all[index] = record
    else this.all.push(record)
    if (shown) this.current = this.all.find((conversation) => conversation.id === id) ?? this.#fresh()
  }
}

export const conversations = new Conversations()
