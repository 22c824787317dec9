// The server's numbers: one sample a second while somebody looks, before that what the server kept of the last half hour.
import { server } from './server.svelte'

export interface Percentiles {
  p50: number | null
  p90: number | null
  p99: number | null
}
export interface Sample {
  time: number
  tokens_per_second: number | null
  prompt_tokens_per_second: number | null
  running: number | null
  waiting: number | null
  kv_usage: number | null
  prefix_hit_rate: number | null
  ttft: Percentiles
  inter_token: Percentiles
  share_of_limit: number | null
  seconds_by_part: Record<string, number> // of all steps so far: the floor, and where the rest went
  preemptions: number | null
  requests: number | null
  model: string
  uptime: number | null
}

/** What the server kept: one list for each number, in the order of time. */
interface Kept {
  interval: number
  columns: Record<string, Column | Record<string, Column>>
}
type Column = (number | null)[]
export type Past = { time: number } & Partial<Sample>

const KEPT = 3600
const EVERY = 1000
const GAP = 5 // seconds without a sample that a line must not bridge
const RECENT = 5 // seconds over which the parts of a step are told

class History {
  samples = $state.raw<Past[]>([])
  latest = $state.raw<Sample | null>(null)
  error = $state('')

  /** What each part of the steps was of the last seconds, the floor first; empty while nothing ran. */
  get parts(): [string, number][] {
    const now = this.latest
    const then = this.samples.find((sample): sample is Sample => 'seconds_by_part' in sample && !!now && sample.time >= now.time - RECENT)
    if (!now || !then) return []
    const spent = Object.entries(now.seconds_by_part).map(([name, sum]): [string, number] => [name, Math.max(sum - (then.seconds_by_part[name] ?? 0), 0)])
    const whole = spent.reduce((sum, [, seconds]) => sum + seconds, 0)
    return whole ? spent.map(([name, seconds]) => [name, seconds / whole]) : []
  }

  /** Samples until `signal` ends it; waits while the page is hidden. */
  async follow(signal: AbortSignal) {
    await this.#recall(signal)
    while (!signal.aborted) {
      if (!document.hidden) await this.#sample(signal)
      await new Promise((resolve) => setTimeout(resolve, EVERY))
    }
  }

  /** Puts what happened before this page was opened, or while it did not look, where it belongs. */
  async #recall(signal: AbortSignal) {
    try {
      const { interval, columns } = await server.json<Kept>('stats/history', { signal: AbortSignal.any([signal, AbortSignal.timeout(8000)]) })
      const mine = this.samples.filter((sample) => 'seconds_by_part' in sample)
      const isNew = (time: number) => !mine.some((sample) => Math.abs(sample.time - time) < interval)
      const past = (columns.time as number[]).map((_, index) => row(columns, index)).filter(({ time }) => isNew(time))
      this.samples = [...past, ...mine].sort((a, b) => a.time - b.time).slice(-KEPT)
    } catch {
      // The plots begin now: an older server, or one that does not answer yet.
    }
  }

  async #sample(signal: AbortSignal) {
    try {
      this.#add(await server.json<Sample>('stats', { signal: AbortSignal.any([signal, AbortSignal.timeout(8000)]) }))
      this.error = ''
    } catch (error) {
      if (!signal.aborted) this.error = error instanceof Error && error.name === 'Error' ? error.message : 'The server does not answer.'
    }
  }

  #add(sample: Sample) {
    const last = this.samples.at(-1)?.time ?? sample.time
    if (sample.time < last) this.samples = [] // another server, or its clock was set back
    const gap = sample.time - last > GAP ? [{ time: last + 1 }] : []
    this.samples = [...this.samples, ...gap, sample].slice(-KEPT)
    this.latest = sample
  }
}

function row(columns: Kept['columns'], index: number): Past {
  const at = (column: Column | Record<string, Column>): unknown =>
    Array.isArray(column) ? column[index] : Object.fromEntries(Object.entries(column).map(([name, values]) => [name, values[index]]))
  return Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, at(column)])) as unknown as Past
}

export const history = new History()
