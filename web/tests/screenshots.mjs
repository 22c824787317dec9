// Takes the pictures of the README from a running server: node tests/screenshots.mjs URL [FOLDER], by default ../docs/images.
// The conversation is real: the server's own model answers, with its default sampling and one seed.
import { mkdirSync, statSync } from 'node:fs'
import { ask, base, launch, screenshotFolder, setSettings, visit } from './browser.mjs'

const folder = screenshotFolder ?? new URL('../../docs/images', import.meta.url).pathname
const MAX_BYTES = 250_000
const NUM_REQUESTS = 24 // for the dashboard
const SEED = 3 // the same picture every time, as long as the model and its sampling stay
const questions = ['What is the capital of France?', 'Write a Python function that reverses a string.']

mkdirSync(folder, { recursive: true })
const browser = await launch()
const context = await browser.newContext({ viewport: { width: 1180, height: 760 }, deviceScaleFactor: 1.5, colorScheme: 'light' })
const page = await context.newPage()

async function capture(name) {
  const path = `${folder}/${name}.png`
  await page.screenshot({ path })
  const { size } = statSync(path)
  if (size > MAX_BYTES) throw new Error(`${path} has ${size} bytes, more than ${MAX_BYTES}`)
  console.log(`${path}: ${size} bytes`)
}

await visit(page)
await setSettings(page, { Seed: SEED })
for (const question of questions) await ask(page, question)
await page.mouse.move(640, 30)
await page.waitForTimeout(800) // code is coloured when its highlighter has come
await capture('chat')

// Requests that overlap, so that the dashboard has something to show.
await page.goto(`${base}/#/dashboard`)
const answers = []
for (let index = 0; index < NUM_REQUESTS; index += 1) {
  const inputs = `Chapter ${index + 1}. The furnace`
  answers.push(page.request.post(`${base}/generate`, { data: { inputs, parameters: { max_new_tokens: 60 + 10 * (index % 5) } }, timeout: 120_000 }))
  await page.waitForTimeout(900)
}
await Promise.all(answers)
await capture('dashboard')
await browser.close()
