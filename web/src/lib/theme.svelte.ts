// Light, dark, or as the system says.
import { MediaQuery } from 'svelte/reactivity'
import { remembered } from './browser'

const stored = remembered('theme')
const ORDER = ['system', 'light', 'dark'] as const

class Theme {
  choice = $state<(typeof ORDER)[number]>(ORDER.find((name) => name === stored.get()) ?? 'system')
  #system = new MediaQuery('(prefers-color-scheme: dark)')
  dark = $derived(this.choice === 'dark' || (this.choice === 'system' && this.#system.current))

  constructor() {
    this.#apply()
  }

  next() {
    this.choice = ORDER[(ORDER.indexOf(this.choice) + 1) % ORDER.length]!
    stored.set(this.choice)
    this.#apply()
  }

  #apply() {
    document.documentElement.dataset.theme = this.choice
  }
}

export const theme = new Theme()
