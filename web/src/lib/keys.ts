// The keyboard: which keys do what. One table, which the overview shows and the page obeys.

export type Action = 'new' | 'find' | 'settings' | 'write' | 'help'
export interface Shortcut {
  keys: string[]
  label: string
  action?: Action // without one, the key is obeyed where it is pressed
}

const COMMAND = /Mac|iPhone|iPad/.test(navigator.platform) ? '⌘' : 'Ctrl'

export const SHORTCUTS: Shortcut[] = [
  { keys: ['Enter'], label: 'Send the message' },
  { keys: ['Shift', 'Enter'], label: 'Break the line' },
  { keys: ['Esc'], label: 'Stop the answer, or close what is open' },
  { keys: [COMMAND, 'Shift', 'O'], label: 'New chat', action: 'new' },
  { keys: [COMMAND, 'K'], label: 'Search all conversations', action: 'find' },
  { keys: [COMMAND, ','], label: 'Settings', action: 'settings' },
  { keys: [COMMAND, 'Enter'], label: 'Continue the text (Completion)' },
  { keys: ['/'], label: 'Write a message', action: 'write' },
  { keys: ['?'], label: 'This overview', action: 'help' },
]

/** The action a key press asks for. Keys without Ctrl or ⌘ are letters while somebody types. */
export function actionFor(event: KeyboardEvent): Action | null {
  if (event.defaultPrevented || event.isComposing || event.altKey) return null
  const command = event.ctrlKey || event.metaKey
  const target = event.target as HTMLElement | null
  const typing = target?.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target?.tagName ?? '')
  if (!command && typing) return null
  const found = SHORTCUTS.find(({ keys }) => {
    const letter = keys.at(-1)!.toLowerCase()
    const shift = letter === '?' || keys.includes('Shift') === event.shiftKey
    return event.key.toLowerCase() === letter && keys.includes(COMMAND) === command && shift
  })
  return found?.action ?? null
}
