// Numbers as people read them. Fixed locale: the page is in English, and widths must not depend on the reader's.

const plain = new Intl.NumberFormat('en', { maximumFractionDigits: 0 })
const short = new Intl.NumberFormat('en', { notation: 'compact', maximumSignificantDigits: 3 })
const missing = '–'

type Maybe = number | null | undefined
const known = (value: Maybe): value is number => typeof value === 'number' && Number.isFinite(value)

export const count = (value: Maybe) => (known(value) ? (Math.abs(value) < 100_000 ? plain : short).format(value) : missing)

/** A speed: one decimal while it matters. */
export const rate = (value: Maybe) => (known(value) ? (value < 100 ? value.toFixed(1) : count(value)) : missing)

export const percent = (value: Maybe) => (known(value) ? `${Math.round(value * 100)}%` : missing)

/** A latency in seconds, in the unit that needs no leading zeros. */
export function latency(value: Maybe): string {
  if (!known(value)) return missing
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`
  return value < 0.9995 ? `${Math.round(value * 1000)} ms` : value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : span(value)
}

/** A long time: its two largest units. */
export function span(seconds: Maybe): string {
  if (!known(seconds)) return missing
  const units: [number, string][] = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']]
  const first = Math.max(0, units.findIndex(([size]) => seconds >= size))
  let rest = Math.floor(seconds < 1 ? 0 : seconds)
  const parts = (seconds < 1 ? units.slice(-1) : units.slice(first, first + 2)).map(([size, name]) => {
    const whole = Math.floor(rest / size)
    rest -= whole * size
    return `${whole} ${name}`
  })
  return parts.filter((part, index) => index === 0 || !part.startsWith('0 ')).join(' ')
}
