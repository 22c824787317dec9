// One short message over the page, with at most one thing to do about it.

interface Notice {
  text: string
  action?: { label: string; run: () => void }
}

class Notices {
  current = $state.raw<Notice | null>(null)
  #timer: ReturnType<typeof setTimeout> | undefined

  show(text: string, action?: Notice['action']) {
    clearTimeout(this.#timer)
    this.current = { text, action }
    this.#timer = setTimeout(() => (this.current = null), action ? 8000 : 4000)
  }

  close() {
    this.current = null
  }
}

export const notices = new Notices()
