// What every browser test needs: Chromium, one context per check, scripted answers, and streams that a test steps through.
// Needs playwright-core, from here or from NODE_PATH, and Chromium at $CHROMIUM or /usr/bin/chromium.
import assert from 'node:assert/strict'
import { createServer } from 'node:http'
import { createRequire } from 'node:module'

const require = createRequire(import.meta.url)
const { chromium } = require('playwright-core')
export const axeSource = require('axe-core').source
export const base = (process.argv[2] ?? 'http://127.0.0.1:8000').replace(/\/$/, '')
/** A server whose model thinks and calls tools; empty: what needs it is not checked. */
export const toolServer = (process.env.TOOL_SERVER ?? '').replace(/\/$/, '')
export const screenshotFolder = process.argv[3]
export const MODEL_TIMEOUT = 120_000 // milliseconds; a small machine may write slowly

const ARGUMENTS = [
  '--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
  '--disable-component-update', '--disable-sync',
]
export const launch = () => chromium.launch({ executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', args: ARGUMENTS })

const NUM_PARALLEL = 3 // checks wait most of the time: for answers, and for what must be seen to happen slowly
const checks = []
let numFailed = 0

async function open(browser, problems, options) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 860 }, acceptDownloads: true, ...options })
  const page = await context.newPage()
  page.setDefaultTimeout(30_000)
  page.on('pageerror', (error) => problems.push(`error in the page: ${error.message}`))
  page.on('console', (message) => /content security policy/i.test(message.text()) && problems.push(message.text()))
  page.on('request', (request) => {
    const isOurs = [base, toolServer].some((url) => url && request.url().startsWith(url))
    if (!isOurs && !/^(blob|data):/.test(request.url())) problems.push(`request elsewhere: ${request.url()}`)
  })
  return page
}

/** Adds a check. It gets a context of its own; an error in the page, a blocked load or a request elsewhere fails it too. */
export const check = (name, work, options) => checks.push({ name, work, options })

async function runCheck(browser, { name, work, options }) {
  const problems = []
  const page = await open(browser, problems, options)
  const start = Date.now()
  try {
    await work(page)
    assert.deepEqual(problems, [])
    console.log(`ok    ${name} (${((Date.now() - start) / 1000).toFixed(1)} s)`)
  } catch (error) {
    numFailed += 1
    console.log(`FAIL  ${name}\n${error.stack}`)
  }
  if (screenshotFolder) await page.screenshot({ path: `${screenshotFolder}/${name.replaceAll(' ', '-')}.png` })
  await page.context().close()
}

/** Runs all checks, in the order they were added, a few at a time. */
export async function runChecks() {
  const browser = await launch()
  const waiting = checks.values()
  const run = async () => {
    for (const one of waiting) await runCheck(browser, one)
  }
  await Promise.all(Array.from({ length: NUM_PARALLEL }, run))
  await browser.close()
  console.log(numFailed ? `${numFailed} failed` : 'all passed')
  process.exit(numFailed ? 1 : 0)
}

// ---- the page --------------------------------------------------------------------------------------

export const ready = (page) => page.locator('.state.ready').waitFor({ timeout: MODEL_TIMEOUT })
export const answered = (page) => page.getByLabel('Send', { exact: true }).waitFor({ timeout: MODEL_TIMEOUT })

/** Opens a view of the page, ready to answer. */
export async function visit(page, url = base) {
  await page.goto(url)
  await ready(page)
}

export async function type(page, text) {
  await page.getByLabel('Message', { exact: true }).fill(text)
  await page.keyboard.press('Enter')
}

export async function ask(page, text) {
  await type(page, text)
  await answered(page)
}

export async function setSettings(page, values) {
  await page.getByLabel('Settings of this chat').click()
  for (const [label, value] of Object.entries(values)) {
    await page.getByLabel(label, { exact: true }).fill(String(value))
    await page.keyboard.press('Tab')
  }
  await page.getByLabel('Close settings').click()
}

// ---- answers ---------------------------------------------------------------------------------------

const event = (data) => `data: ${JSON.stringify(data)}\n\n`
export const delta = (fields) => event({ choices: [{ index: 0, delta: fields }] })
export const chunk = (content) => delta({ content })
export const ended = (reason = 'stop') =>
  event({ choices: [{ index: 0, delta: {}, finish_reason: reason }] }) +
  event({ choices: [], usage: { prompt_tokens: 12, completion_tokens: 3 } }) + 'data: [DONE]\n\n'
export const answer = (content, reason) => `: keep-alive\n\n${chunk(content)}${ended(reason)}`

/** Answers chat requests in the browser, each by the next of `bodies` and then by the last one. Returns the requests. */
export async function scripted(page, ...bodies) {
  const requests = []
  await page.route('**/v1/chat/completions', (route) => {
    const body = bodies[Math.min(requests.length, bodies.length - 1)]
    requests.push({ ...route.request().postDataJSON(), authorization: route.request().headers().authorization })
    return route.fulfill(typeof body === 'string' ? { contentType: 'text/event-stream', body } : body)
  })
  return requests
}

/** Answers the page's next chat request with a stream that the test writes: `send` a piece, `end` it, or see it `closed`. */
export async function stepped(page) {
  let response
  let onRequest
  let onClose
  const requested = new Promise((resolve) => (onRequest = resolve))
  const closed = new Promise((resolve) => (onClose = resolve))
  const server = createServer((request, opened) => {
    response = opened
    response.writeHead(200, { 'content-type': 'text/event-stream' })
    response.on('close', onClose)
    onRequest()
  })
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve))
  await page.route('**/v1/chat/completions', (route) => route.continue({ url: `http://127.0.0.1:${server.address().port}/` }), { times: 1 })
  page.on('close', () => server.close())
  return {
    requested, closed,
    send: (text) => response.write(text),
    end: (text = ended()) => response.end(text),
  }
}

/** Adds fields to the page's chat requests, which go on to the server. */
export const requestedWith = (page, fields) => page.route('**/v1/chat/completions', (route) =>
  route.continue({ postData: JSON.stringify({ ...route.request().postDataJSON(), ...fields }) }))

/** Answers a GET of the server with its own JSON, changed. */
export async function changed(page, path, change) {
  await page.route(`**/${path}`, async (route) => {
    const body = await (await route.fetch()).json()
    return route.fulfill({ json: { ...body, ...change } })
  })
}
