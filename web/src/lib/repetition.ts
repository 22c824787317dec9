// Whether a text has run into a loop. Small models do that; the reader should not have to watch it for a thousand tokens.

const TAIL = 4000 // characters looked at
const LEAST = 480 // characters a loop must fill: a table may have some equal rows
const ROUNDS = 4 // and how often its unit must have come

/** Whether `text` ends in one unit again and again. A rule or a blank run is short enough to pass. */
export function loops(text: string): boolean {
  if (text.length < LEAST) return false
  const tail = [...text.slice(-TAIL)].reverse()
  // The failure function of the reversed text: the shortest period of each of its suffixes follows from it.
  const borders = new Uint16Array(tail.length)
  for (let end = 1, border = 0; end < tail.length; end += 1) {
    while (border && tail[end] !== tail[border]) border = borders[border - 1]!
    if (tail[end] === tail[border]) border += 1
    borders[end] = border
    const length = end + 1
    if (length >= LEAST && length >= ROUNDS * (length - border)) return true
  }
  return false
}
