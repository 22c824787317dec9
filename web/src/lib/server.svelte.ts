// The server as the page knows it: whether it is ready, which models it has, and how to call it with the key it asks for.
import { remembered } from './browser'

export type State = 'connecting' | 'loading' | 'ready' | 'draining' | 'restarting' | 'failed' | 'unreachable'
export interface Model {
  id: string
  max_model_len?: number
  /** The base model, if this is a LoRA adapter. */
  parent?: string | null
}

/** What /info says about the model, as far as the page uses it. */
export interface Info {
  model_id?: string
  max_total_tokens?: number | null
  version?: string
  sampling_defaults?: Record<string, number | string | null>
  /** How the model writes its answers; null until the server has found out. */
  response_format?: { format?: { reasoning?: object | null; calls?: object | null }; tool_problem?: string } | null
  has_chat_template?: boolean
  demo?: boolean
  recommended_model?: { model: string; arguments: string; gigabytes: number; tokens_per_second: number } | null
}

export class ServerError extends Error {
  constructor(message: string, readonly status: number) {
    super(message)
  }
}

const storedKey = remembered('key')
const storedModel = remembered('model')
const address = (path: string) => new URL(path, document.baseURI).href
const pause = (milliseconds: number) => new Promise((resolve) => setTimeout(resolve, milliseconds))
const STATES: State[] = ['loading', 'ready', 'draining', 'restarting', 'failed']

class Server {
  state = $state<State>('connecting')
  progress = $state<number | null>(null)
  detail = $state('')
  models = $state.raw<Model[]>([])
  info = $state.raw<Info | null>(null)
  chosen = $state(storedModel.get() ?? '')
  /** Set while the page asks for a key: was one refused, or was there none? */
  asking = $state<'missing' | 'refused' | null>(null)
  #reported = $state('')
  #key = $state(storedKey.get() ?? '')
  #answer: ((given: boolean) => void) | undefined
  #asked: Promise<boolean> | undefined
  #declined = false
  #waiting = new Set<() => void>()

  /** The model requests go to: the reader's choice where the server has it, else its first. */
  model = $derived<Model | null>(this.models.find((model) => model.id === this.chosen) ?? this.models[0] ?? null)
  name = $derived(this.model?.id ?? this.#reported)
  baseModels = $derived(this.models.filter((model) => !model.parent))
  adapters = $derived(this.models.filter((model) => model.parent))
  /** Whether the model can chat: a base model has no chat template, and only continues texts. */
  chats = $derived(this.info?.has_chat_template !== false)
  /** Whether the model thinks before it answers; null: unknown. */
  reasons = $derived(this.info?.response_format ? !!this.info.response_format.format?.reasoning : null)
  /** Why the model cannot call tools; empty when it can, or when that is unknown. */
  toolProblem = $derived(this.info?.response_format?.tool_problem ?? '')
  hasKey = $derived(this.#key !== '')
  url = address('.').replace(/\/$/, '')

  choose(id: string) {
    this.chosen = id
    storedModel.set(id)
  }

  /** Watches the server for as long as the page lives: each second until it is ready, seldom afterwards. */
  async watch(): Promise<never> {
    for (;;) {
      await this.check()
      await pause(this.state === 'ready' ? 10_000 : 1000)
    }
  }

  async check() {
    const before = this.state
    try {
      const response = await fetch(address('ready'), { headers: this.#headers(), signal: AbortSignal.timeout(8000), cache: 'no-store' })
      const body = await response.json().catch(() => ({}))
      this.state = STATES.includes(body.state) ? body.state : response.ok || response.status === 401 ? 'ready' : 'loading'
      this.#reported = body.model ?? this.#reported
      this.progress = body.progress ?? null
      this.detail = body.detail ?? ''
    } catch {
      this.state = 'unreachable'
    }
    if (this.state !== 'ready') return
    const isKnown = this.models.length && this.info?.response_format !== null
    if (before !== 'ready' || !isKnown) await this.#list()
    for (const go of this.#waiting) go()
  }

  /** Resolves once the model can answer, at once when it can already. */
  whenReady(signal: AbortSignal): Promise<void> {
    if (this.state === 'ready') return Promise.resolve()
    return new Promise((resolve, reject) => {
      const go = () => {
        this.#waiting.delete(go)
        resolve()
      }
      signal.addEventListener('abort', () => {
        this.#waiting.delete(go)
        reject(signal.reason)
      })
      this.#waiting.add(go)
    })
  }

  async json<T>(path: string, init?: RequestInit): Promise<T> {
    return (await this.request(path, { quiet: true, ...init })).json()
  }

  /** Calls the server and returns whatever it answers, errors too; asks for a key as `request` does. */
  async attempt(path: string, init: RequestInit = {}): Promise<Response> {
    for (;;) {
      const key = this.#key
      const response = await fetch(address(path), { ...init, headers: this.#headers(init.body != null), cache: 'no-store' })
      if (response.status !== 401 || !(this.#key !== key || (await this.#ask(key)))) return response
    }
  }

  /** Calls the server; asks the reader for a key on 401 and tries again. A `quiet` call asks only once per page. */
  async request(path: string, { quiet = false, ...init }: RequestInit & { quiet?: boolean } = {}): Promise<Response> {
    for (;;) {
      const key = this.#key
      const response = await fetch(address(path), { ...init, headers: this.#headers(init.body != null), cache: 'no-store' })
      if (response.ok) return response
      if (response.status !== 401) throw await failure(response)
      if (this.#key !== key) continue
      if ((quiet && this.#declined) || !(await this.#ask(key))) throw await failure(response)
    }
  }

  /** The reader's answer to the key dialog; null when it was closed. */
  give(key: string | null) {
    this.asking = null
    this.#declined = key === null
    if (key !== null) storedKey.set((this.#key = key))
    this.#answer?.(key !== null)
    this.#asked = undefined
  }

  forgetKey() {
    this.#key = ''
    storedKey.set(null)
  }

  #ask(refused: string): Promise<boolean> {
    this.asking ??= refused ? 'refused' : 'missing'
    return (this.#asked ??= new Promise((resolve) => (this.#answer = resolve)))
  }

  /** Adapters come and go while the page is open. */
  async refreshModels() {
    try {
      const { data } = await this.json<{ data: Model[] }>('v1/models')
      const ids = (models: Model[]) => models.map((model) => model.id).join('\n')
      if (ids(data) !== ids(this.models)) this.models = data
    } catch {
      // The list stays as it is; the state tells whether the server answers.
    }
  }

  async #list() {
    try {
      this.models = (await this.json<{ data: Model[] }>('v1/models')).data
      this.info = await this.json<Info>('info')
    } catch {
      this.models = [] // asked again with the next check
    }
  }

  #headers(body = false): Record<string, string> {
    return { ...(this.#key && { Authorization: `Bearer ${this.#key}` }), ...(body && { 'Content-Type': 'application/json' }) }
  }
}

/** What a refused request says, in OpenAI's form or TGI's, or by its status alone. */
async function failure(response: Response): Promise<ServerError> {
  const body = await response.json().catch(() => ({}))
  const said = body.error?.message ?? (typeof body.error === 'string' ? body.error : body.message)
  return new ServerError(said ?? `The server answered ${response.status} ${response.statusText}`.trim() + '.', response.status)
}

export const server = new Server()
