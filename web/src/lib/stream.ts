// Server-sent events of a fetch response. EventSource cannot POST, so the format is read here; it knows no payloads.

/** The data of each event, in order; comments (keep-alives) and other fields are skipped. */
export async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = body.pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>).getReader()
  let rest = ''
  try {
    for (;;) {
      const { done, value } = await reader.read()
      if (done) return
      const parts = (rest + value).split(/\r?\n\r?\n/)
      rest = parts.pop() ?? ''
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith('data:'))
        if (lines.length) yield lines.map((line) => line.slice(line[5] === ' ' ? 6 : 5)).join('\n')
      }
    }
  } finally {
    await reader.cancel().catch(() => {})
  }
}
