// Small things a browser offers only in secure contexts, or in a clumsy form: the page must also work over plain HTTP.

export function identifier(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, '0')).join('')
}

export async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text)
    return true
  } catch {
    const area = Object.assign(document.createElement('textarea'), { value: text, className: 'unseen' })
    const focused = document.activeElement
    document.body.append(area)
    area.select()
    const copied = document.execCommand('copy')
    area.remove()
    if (focused instanceof HTMLElement) focused.focus()
    return copied
  }
}

export function download(name: string, type: string, text: string) {
  const url = URL.createObjectURL(new Blob([text], { type }))
  Object.assign(document.createElement('a'), { href: url, download: name }).click()
  setTimeout(() => URL.revokeObjectURL(url), 10_000)
}

/** A value kept in this browser; storage may be forbidden, then it lives as long as the page. */
export function remembered(name: string) {
  const key = `bloomery.${name}`
  return {
    get(): string | null {
      try {
        return localStorage.getItem(key)
      } catch {
        return null
      }
    },
    set(value: string | null) {
      try {
        if (value === null) localStorage.removeItem(key)
        else localStorage.setItem(key, value)
      } catch {
        // Nothing to do: the page keeps its own copy.
      }
    },
  }
}
