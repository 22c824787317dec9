// Drives the page in a real Chromium against a running server: node tests/page.mjs URL [FOLDER for screenshots].
// First what needs the real model (streaming, stopping, finding it again, the dashboard), then what no server does on
// demand (hostile answers, broken streams, a missing key, a loading model), by answering single requests in the browser.
// Needs playwright-core, from here or from NODE_PATH, and Chromium at $CHROMIUM or /usr/bin/chromium.
import assert from 'node:assert/strict'
import { createRequire } from 'node:module'
import { readFileSync } from 'node:fs'

const { chromium } = createRequire(import.meta.url)('playwright-core')
const base = (process.argv[2] ?? 'http://127.0.0.1:8000').replace(/\/$/, '')
const shots = process.argv[3]
const PATIENCE = 120_000 // a small machine may write slowly

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
  args: ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
    '--disable-component-update', '--disable-sync'],
})
const problems = []
let failed = 0

async function open(options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 860 }, acceptDownloads: true, ...options })
  const page = await context.newPage()
  page.setDefaultTimeout(15_000)
  page.on('pageerror', (error) => problems.push(`error in the page: ${error.message}`))
  page.on('console', (message) => /content security policy/i.test(message.text()) && problems.push(message.text()))
  page.on('request', (request) => {
    if (!request.url().startsWith(base) && !/^(blob|data):/.test(request.url())) problems.push(`request elsewhere: ${request.url()}`)
  })
  return page
}

async function check(name, work, options) {
  const page = await open(options)
  try {
    await work(page)
    assert.deepEqual(problems, [])
    console.log(`ok    ${name}`)
  } catch (error) {
    failed += 1
    console.log(`FAIL  ${name}\n${error.stack}`)
  }
  problems.length = 0
  if (shots) await page.screenshot({ path: `${shots}/${name.replaceAll(' ', '-')}.png` })
  await page.context().close()
}

// ---- what the checks say again and again -------------------------------------------------------------

const ready = (page) => page.locator('.state.ready').waitFor({ timeout: PATIENCE })
const finished = (page) => page.getByLabel('Send', { exact: true }).waitFor({ timeout: PATIENCE })

async function type(page, text) {
  await page.getByLabel('Message', { exact: true }).fill(text)
  await page.keyboard.press('Enter')
}

async function ask(page, text) {
  await type(page, text)
  await finished(page)
}

async function sampling(page, values) {
  await page.getByLabel('Settings of this chat').click()
  for (const [label, value] of Object.entries(values)) {
    await page.getByLabel(label, { exact: true }).fill(String(value))
    await page.keyboard.press('Tab')
  }
  await page.getByLabel('Close settings').click()
}

const chunk = (content) => `data: ${JSON.stringify({ choices: [{ index: 0, delta: { content } }] })}\n\n`
const ended = `data: ${JSON.stringify({ choices: [{ index: 0, delta: {}, finish_reason: 'stop' }] })}\n\n` +
  `data: ${JSON.stringify({ choices: [], usage: { prompt_tokens: 12, completion_tokens: 3 } })}\n\ndata: [DONE]\n\n`
const whole = (content) => `: keep-alive\n\n${chunk(content)}${ended}`

/** Answers chat requests in the browser, each by the next of `bodies` (the last one again and again); notes what was asked. */
async function scripted(page, ...bodies) {
  const asked = []
  await page.route('**/v1/chat/completions', (route) => {
    const body = bodies[Math.min(asked.length, bodies.length - 1)]
    asked.push({ ...route.request().postDataJSON(), authorization: route.request().headers().authorization })
    return route.fulfill(typeof body === 'string' ? { contentType: 'text/event-stream', body } : body)
  })
  return asked
}

// ---- with the real model -----------------------------------------------------------------------------

await check('the page is served strictly', async (page) => {
  const response = await page.goto(base)
  const policy = response.headers()['content-security-policy'] ?? ''
  for (const rule of ["default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"]) {
    assert.ok(policy.includes(rule), `${rule} in “${policy}”`)
  }
  assert.ok(!policy.includes('unsafe'), policy)
  await ready(page)
})

await check('a message streams and is found again', async (page) => {
  await page.goto(base)
  await ready(page)
  await sampling(page, { 'Max tokens': 60, Seed: 7 })
  await page.evaluate(() => {
    globalThis.lengths = new Set()
    new MutationObserver(() => {
      const prose = document.querySelector('.prose')
      globalThis.lengths.add(prose?.textContent.length ?? 0)
      globalThis.first ??= prose?.firstElementChild ?? undefined
    }).observe(document.body, { childList: true, subtree: true, characterData: true })
  })
  await ask(page, 'Tell me about the sea in three sentences.')
  const said = await page.locator('.prose').innerText()
  assert.ok(said.trim().length > 0, 'an answer')
  assert.ok((await page.evaluate(() => globalThis.lengths.size)) > 3, 'the answer grew in several steps')
  const stayed = await page.evaluate(() => {
    const now = document.querySelector('.prose').firstElementChild
    return now === globalThis.first || now.tagName !== globalThis.first.tagName
  })
  assert.ok(stayed, 'the first paragraph was never drawn anew')
  assert.match(await page.locator('[data-stats]').innerText(), /to first token\s·\s\d+ tokens?\s·\s[\d.,]+ tokens\/s/)
  await page.reload()
  await page.getByRole('link', { name: 'Tell me about the sea' }).waitFor()
  assert.equal(await page.locator('.prose').innerText(), said)
})

await check('an answer can be stopped and keeps its text', async (page) => {
  await page.goto(base)
  await ready(page)
  await type(page, 'Count from one to one thousand in words, without stopping.')
  await page.waitForFunction(() => document.querySelector('.prose')?.textContent.length > 5, null, { timeout: PATIENCE })
  await page.keyboard.press('Escape')
  await page.getByText('Stopped.').waitFor({ timeout: 5000 })
  const said = await page.locator('.prose').innerText()
  assert.ok(said.length > 5)
  await page.reload()
  await page.locator('.prose').waitFor()
  assert.equal(await page.locator('.prose').innerText(), said)
})

await check('the dashboard shows live numbers', async (page) => {
  await page.goto(`${base}/#/dashboard`)
  await page.waitForFunction(() => document.querySelectorAll('.plot canvas').length === 6)
  await page.locator('.tile', { hasText: 'Requests' }).getByText(/^[\d,.]+[KM]?$/).waitFor()
  await page.request.post(`${base}/generate`, { data: { inputs: 'Once', parameters: { max_new_tokens: 200 } } })
  const { seconds_by_part: parts } = await (await page.request.get(`${base}/stats`)).json()
  await page.locator('.rest').getByText(parts.kernels ? /kernels \d+%/ : '–').waitFor() // not every server has any
  await page.getByRole('button', { name: '5 min' }).click()
  assert.equal(await page.locator('.plot canvas').count(), 6)
})

await check('the API tab names this server and model', async (page) => {
  await page.goto(base)
  await ready(page)
  const { data } = await (await page.request.get(`${base}/v1/models`)).json()
  await page.goto(`${base}/#/api`)
  for (const tool of ['curl', 'Python', 'JavaScript']) {
    await page.getByRole('button', { name: tool }).click()
    const code = await page.locator('pre').first().innerText()
    assert.ok(code.includes(`${base}/v1`), code)
    assert.ok(code.includes(data[0].id), code)
  }
})

// ---- what no server does on demand -------------------------------------------------------------------

await check('a hostile answer stays text', async (page) => {
  const hostile = readFileSync(new URL('hostile.md', import.meta.url), 'utf8')
  await scripted(page, hostile.split(/(?<=\n)/).map(chunk).join('') + ended)
  await page.goto(base)
  await ready(page)
  await ask(page, 'Attack me.')
  await page.getByText('The end.').waitFor()
  const found = await page.locator('.prose').evaluate((prose) => ({
    elements: [...prose.querySelectorAll('script, img, iframe, object, embed, form, input, style, link, meta, svg:not(button svg), base')]
      .map((one) => one.outerHTML),
    attributes: [...prose.querySelectorAll('*')].flatMap((one) => [...one.attributes].map((attribute) => attribute.name))
      .filter((name) => /^(on|style|src)/.test(name)),
    code: prose.querySelector('pre').textContent,
    links: [...prose.querySelectorAll('a')].map((one) => `${one.protocol} ${one.target} ${one.rel}`),
    hacked: globalThis.hacked,
  }))
  assert.deepEqual(found.elements, [])
  assert.deepEqual(found.attributes, [])
  assert.equal(found.hacked, undefined)
  assert.equal(found.code, /```html\n(.*)\n```/.exec(hostile)[1], 'code is shown as it was written')
  assert.ok(found.links.length > 0)
  for (const link of found.links) assert.match(link, /^(https?|mailto): _blank noopener noreferrer nofollow$/)
})

await check('errors are shown in place and can be retried', async (page) => {
  const asked = await scripted(page,
    { status: 429, json: { error: { message: 'The queue is full.', type: 'overloaded' } } },
    chunk('Half of ') + `data: ${JSON.stringify({ error: { message: 'The engine gave up.' } })}\n\n`,
    chunk('Half of it'), // the connection ends without [DONE]
    whole('All of it.'))
  await page.goto(base)
  await ready(page)
  await ask(page, 'Fail, please.')
  await page.getByText('The queue is full.').waitFor()
  await page.getByRole('button', { name: 'Retry' }).click()
  await page.getByText('The engine gave up.').waitFor()
  assert.equal(await page.locator('.prose').innerText(), 'Half of')
  await page.getByRole('button', { name: 'Retry' }).click()
  await page.getByText('The connection was lost').waitFor()
  assert.equal(await page.locator('.prose').innerText(), 'Half of it')
  await page.getByRole('button', { name: 'Retry' }).click()
  await page.getByText('All of it.').waitFor()
  assert.equal(await page.getByRole('alert').count(), 0)
  assert.equal(asked.length, 4)
})

await check('retry, edit, continue and the settings are sent', async (page) => {
  const asked = await scripted(page, whole('First.'), whole('Second.'), whole(' And on.'), whole('Third.'))
  await page.goto(base)
  await ready(page)
  await sampling(page, { 'System prompt': 'Be brief.', Temperature: 0.5, 'Top k': 20, 'Stop at': 'END' })
  await ask(page, 'One?')
  await page.getByLabel('Answer again').click()
  await page.getByText('Second.').waitFor()
  await page.getByLabel('Previous version').click()
  await page.getByText('First.').waitFor()
  await page.getByLabel('Continue this answer').click()
  await page.getByText('First. And on.').waitFor()
  await page.getByRole('article', { name: 'You' }).hover()
  await page.getByLabel('Edit and send again').click()
  await page.getByLabel('Edit your message').fill('Two?')
  await page.keyboard.press('Enter')
  await page.getByText('Third.').waitFor()
  const [first, , third, fourth] = asked
  assert.deepEqual(first.messages, [{ role: 'system', content: 'Be brief.' }, { role: 'user', content: 'One?' }])
  assert.deepEqual([first.temperature, first.top_k, first.stop], [0.5, 20, ['END']])
  assert.deepEqual([first.stream, first.stream_options], [true, { include_usage: true }])
  assert.ok(!('top_p' in first) && !('seed' in first), 'what is not set is not sent')
  assert.deepEqual([third.continue_final_message, third.add_generation_prompt], [true, false])
  assert.deepEqual(third.messages.at(-1), { role: 'assistant', content: 'First.' })
  assert.deepEqual(fourth.messages.at(-1), { role: 'user', content: 'Two?' })
})

await check('conversations are renamed, exported, deleted and imported', async (page) => {
  await scripted(page, whole('Kept.'))
  await page.goto(base)
  await ready(page)
  await ask(page, 'Remember this.')
  await page.getByLabel('Rename Remember this.').click()
  await page.getByLabel('New title').fill('Memory')
  await page.keyboard.press('Enter')
  const [download] = await Promise.all([page.waitForEvent('download'), page.getByLabel('Export Memory').click()])
  const file = await download.path()
  assert.equal(JSON.parse(readFileSync(file, 'utf8')).conversations[0].title, 'Memory')
  await page.getByLabel('Delete Memory').click()
  await page.getByRole('button', { name: 'Undo' }).waitFor()
  assert.equal(await page.getByRole('link', { name: 'Memory' }).count(), 0)
  await page.getByLabel('File to import').setInputFiles({ name: 'export.json', mimeType: 'application/json', buffer: readFileSync(file) })
  await page.getByRole('link', { name: 'Memory' }).click()
  await page.getByText('Kept.').waitFor()
  await page.getByLabel('File to import').setInputFiles({ name: 'other.json', mimeType: 'application/json', buffer: Buffer.from('[]') })
  await page.getByText('other.json was not exported by this page.').waitFor()
})

await check('a message written while the model loads is sent when it is ready', async (page) => {
  const asked = await scripted(page, whole('At last.'))
  const loading = { state: 'loading', model: 'm', progress: 0.42, detail: 'reading weights' }
  await page.route('**/ready', (route) => route.fulfill({ status: 503, json: loading }))
  await page.goto(base)
  await page.getByText('Loading 42% · reading weights').waitFor()
  await type(page, 'Early.')
  await page.getByText('Sent when the model is ready').waitFor()
  if (shots) await page.screenshot({ path: `${shots}/loading.png` })
  assert.equal(asked.length, 0)
  await page.unroute('**/ready')
  await page.getByText('At last.').waitFor({ timeout: PATIENCE })
})

await check('a key is asked for once and kept', async (page) => {
  const guarded = async (route) => {
    const given = route.request().headers().authorization
    if (given !== 'Bearer secret') return route.fulfill({ status: 401, json: { error: { message: 'Key, please.' } } })
    return route.request().url().endsWith('models')
      ? route.fulfill({ json: { data: [{ id: 'guarded' }] } })
      : route.fulfill({ contentType: 'text/event-stream', body: whole('Welcome.') })
  }
  await page.route('**/v1/**', guarded)
  await page.goto(base)
  await page.getByText('This server needs an API key').waitFor({ timeout: PATIENCE })
  await page.getByLabel('API key', { exact: true }).fill('wrong')
  await page.keyboard.press('Enter')
  await page.getByText('The server refused this key').waitFor()
  await page.getByLabel('API key', { exact: true }).fill('secret')
  await page.keyboard.press('Enter')
  await ask(page, 'Hello?')
  await page.getByText('Welcome.').waitFor()
  await page.reload()
  await ready(page)
  await ask(page, 'Again?')
  assert.equal(await page.getByRole('dialog').count(), 0)
})

await check('a phone of 320 pixels shows everything', async (page) => {
  const table = `| a | b | c |\n|---|---|---|\n| ${'long '.repeat(20)} | ${'y'.repeat(60)} | z |`
  const code = `\`\`\`python\n${'z = 1; '.repeat(40)}\n\`\`\``
  await scripted(page, whole(['# Wide', `\`${'x'.repeat(200)}\``, table, code].join('\n\n')))
  for (const view of ['', 'dashboard', 'api']) {
    await page.goto(`${base}/#/${view}`)
    await page.getByLabel('Menu').waitFor()
    if (!view) await ask(page, 'Go wide.')
    await page.waitForTimeout(300)
    const wide = await page.locator('body, main, .log, .inside, .composer').evaluateAll((found) =>
      found.filter((one) => one.scrollWidth > 321).map((one) => one.className || one.tagName))
    assert.deepEqual(wide, [], view || 'chat')
  }
  await page.getByLabel('Menu').click()
  await page.getByRole('link', { name: 'Go wide.' }).click()
  await page.getByRole('heading', { name: 'Wide', exact: true }).waitFor()
}, { viewport: { width: 320, height: 640 }, isMobile: true, hasTouch: true, colorScheme: 'dark' })

await browser.close()
console.log(failed ? `${failed} failed` : 'all well')
process.exit(failed ? 1 : 0)
