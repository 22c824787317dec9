// Where the reader is, as the address after '#': a new chat, #/chat/ID, #/complete, #/dashboard or #/api. Back and forward just work.

export type View = 'chat' | 'complete' | 'dashboard' | 'api'
const VIEWS: View[] = ['complete', 'dashboard', 'api']

class Route {
  view = $state<View>('chat')
  id = $state<string | null>(null)

  constructor() {
    this.#read()
    addEventListener('hashchange', () => this.#read())
  }

  /** Names the chat on screen without leaving it. */
  name(id: string) {
    history.replaceState(null, '', `#/chat/${id}`)
    this.#read()
  }

  #read() {
    const [, view, id] = location.hash.split('/')
    this.view = VIEWS.find((name) => name === view) ?? 'chat'
    this.id = (view === 'chat' && id) || null
  }
}

export const route = new Route()
