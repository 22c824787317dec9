// Drives the page in a real Chromium against a running server: node tests/page.mjs URL [FOLDER for screenshots].
// First what needs the server itself (streaming, stopping, the dashboard, the API reference), then what no server does on
// demand (hostile answers, broken streams, reasoning, tool calls, a missing key), by answering single requests in the browser.
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import {
  answer, answered, ask, axeSource, base, changed, check, chunk, delta, ended, MODEL_TIMEOUT, ready, requestedWith, runChecks, scripted, setSettings,
  stepped, toolServer, type, visit,
} from './browser.mjs'

// ---- with the server's own model ---------------------------------------------------------------------

check('the page is served strictly', async (page) => {
  for (const path of ['', 'docs']) {
    const response = await page.goto(`${base}/${path}`)
    const policy = response.headers()['content-security-policy'] ?? ''
    for (const rule of ["default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"]) {
      assert.ok(policy.includes(rule), `${rule} in “${policy}”`)
    }
    assert.ok(!policy.includes('unsafe'), policy)
  }
})

check('a message streams and is found again', async (page) => {
  await requestedWith(page, { ignore_eos: true }) // long enough to grow in many steps
  await visit(page)
  await setSettings(page, { 'Max tokens': 40, Seed: 7 })
  await page.evaluate(() => {
    globalThis.lengths = new Set()
    new MutationObserver(() => {
      const prose = document.querySelector('.prose')
      globalThis.lengths.add(prose?.textContent.length ?? 0)
      globalThis.first ??= prose?.firstElementChild ?? undefined
    }).observe(document.body, { childList: true, subtree: true, characterData: true })
  })
  await ask(page, 'Tell me about the sea in three sentences.')
  const text = await page.locator('.prose').innerText()
  assert.ok(text.trim().length > 0, 'an answer')
  assert.ok((await page.evaluate(() => globalThis.lengths.size)) > 3, 'the answer grew in several steps')
  const isSame = await page.evaluate(() => {
    const now = document.querySelector('.prose').firstElementChild
    return now === globalThis.first || now.tagName !== globalThis.first.tagName
  })
  assert.ok(isSame, 'the first paragraph was never drawn anew')
  assert.match(await page.locator('[data-stats]').innerText(), /to first token\s·\s\d+ tokens?\s·\s[\d.,]+ tokens\/s/)
  await page.reload()
  await page.getByRole('link', { name: 'Tell me about the sea' }).waitFor()
  assert.equal(await page.locator('.prose').innerText(), text)
})

check('an answer can be stopped and keeps its text and its context meter', async (page) => {
  await requestedWith(page, { ignore_eos: true }) // the model must not end the answer before the test stops it
  await visit(page)
  await type(page, 'Count from one to one thousand in words, without stopping.')
  await page.waitForFunction(() => document.querySelector('.prose')?.innerText.trim().length > 20, null, { timeout: MODEL_TIMEOUT })
  await page.keyboard.press('Escape')
  await page.getByText('Stopped.').waitFor({ timeout: 5000 })
  const text = await page.locator('.prose').innerText()
  const context = await page.locator('[data-context]').innerText()
  assert.ok(text.length > 5)
  assert.match(context, /^\s*[\d,]+ of [\d,]+ tokens/)
  await page.reload()
  await ready(page)
  await page.getByText(context.trim()).waitFor()
  assert.equal(await page.locator('.prose').innerText(), text)
  assert.equal(await page.locator('[data-context]').innerText(), context)
})

check('the dashboard shows live numbers', async (page) => {
  await page.goto(`${base}/#/dashboard`)
  await page.waitForFunction(() => document.querySelectorAll('.plot canvas').length === 6)
  await page.locator('.tile', { hasText: 'Requests' }).getByText(/^[\d,.]+[KM]?$/).waitFor()
  await page.request.post(`${base}/generate`, { data: { inputs: 'Once', parameters: { max_new_tokens: 200 } } })
  const { seconds_by_part: parts } = await (await page.request.get(`${base}/stats`)).json()
  await page.locator('.rest').getByText(parts.kernels ? /kernels \d+%/ : '–').waitFor() // not every server has any
  await page.getByRole('button', { name: '5 min' }).click()
  assert.equal(await page.locator('.plot canvas').count(), 6)
})

check('the dashboard shows the half hour before it was opened', async (page) => {
  const { interval, columns } = await (await page.request.get(`${base}/stats/history`)).json()
  assert.ok(columns.time.length > 0, 'the server keeps samples while nobody looks')
  const now = Date.now() / 1000
  const time = Array.from({ length: 900 }, (_, index) => now - (900 - index) * interval)
  const column = (name) => (Array.isArray(columns[name]) ? time.map(() => 123) : { p50: time.map(() => 1), p90: time.map(() => 2), p99: time.map(() => 3) })
  const past = { time, ...Object.fromEntries(Object.keys(columns).filter((name) => name !== 'time').map((name) => [name, column(name)])) }
  await page.route('**/stats/history', (route) => route.fulfill({ json: { interval, columns: past } }))
  await page.goto(`${base}/#/dashboard`)
  await page.getByRole('button', { name: '30 min' }).click()
  const plot = page.getByRole('region', { name: 'Output, tokens/s' })
  await plot.locator('canvas').waitFor()
  await page.locator('.tile', { hasText: 'Requests' }).getByText(/^[\d,.]+[KM]?$/).waitFor()
  await plot.locator('.u-over').hover({ position: { x: 80, y: 60 } })
  await plot.locator('dd').getByText('123').waitFor()
})

check('the API tab names this server and model', async (page) => {
  await visit(page)
  const { data } = await (await page.request.get(`${base}/v1/models`)).json()
  await page.goto(`${base}/#/api`)
  for (const tool of ['curl', 'Python', 'JavaScript']) {
    await page.getByRole('button', { name: tool }).click()
    const code = await page.locator('pre').first().innerText()
    assert.ok(code.includes(`${base}/v1`), code)
    assert.ok(code.includes(data[0].id), code)
  }
})

check('the API reference lists every route and tries one', async (page) => {
  await page.goto(`${base}/docs`)
  const document = await (await page.request.get(`${base}/openapi.json`)).json()
  const numRoutes = Object.values(document.paths).reduce((sum, methods) => sum + Object.keys(methods).length, 0)
  await page.locator('.operation').first().waitFor()
  assert.equal(await page.locator('.operation').count(), numRoutes)
  await page.getByLabel('Find a route').fill('chat completions answer')
  await page.locator('.operation summary', { hasText: '/v1/chat/completions' }).first().click()
  await page.getByText('include_usage').waitFor({ state: 'attached' })
  await page.getByRole('button', { name: 'Send' }).click()
  await page.getByText(/^200 OK in/).waitFor({ timeout: MODEL_TIMEOUT })
  assert.match(await page.locator('.answer pre').innerText(), /data: \{[\s\S]+data: \[DONE\]/)
  await page.getByText('As a curl command').click()
  assert.ok((await page.locator('.try details pre').innerText()).includes(`curl -N ${base}/v1/chat/completions`))
  await page.getByLabel('Body').fill('{"messages": "text"}')
  await page.getByRole('button', { name: 'Send' }).click()
  await page.getByText(/^400 /).waitFor()
  await page.getByLabel('Body').fill('{"messages": ')
  await page.getByText('This is not JSON').waitFor()
  assert.ok(await page.getByRole('button', { name: 'Send' }).isDisabled())
})

check('a base model continues a text', async (page) => {
  await changed(page, 'info', { has_chat_template: false })
  await visit(page)
  await page.getByText('This is a base model').waitFor()
  const beginning = 'The furnace was built of clay'
  await setSettings(page, { 'Max tokens': 8 })
  await page.getByLabel('Text', { exact: true }).fill(beginning)
  await page.keyboard.press('Control+Enter')
  await page.getByText(/limit of tokens is reached|ended the text/).waitFor({ timeout: MODEL_TIMEOUT })
  const text = await page.getByLabel('Text', { exact: true }).inputValue()
  assert.ok(text.startsWith(beginning) && text.length > beginning.length, text)
  await page.getByRole('button', { name: 'Undo' }).click()
  assert.equal(await page.getByLabel('Text', { exact: true }).inputValue(), beginning)
})

check('text files are attached, counted and sent as parts', async (page) => {
  const requests = await scripted(page, answer('Read.'))
  await visit(page)
  const picker = page.getByLabel('Text files to attach')
  await picker.setInputFiles([
    { name: 'ore.txt', mimeType: 'text/plain', buffer: Buffer.from('Ore and charcoal.\n') },
    { name: 'notes.md', mimeType: 'text/markdown', buffer: Buffer.from('# Notes\n\n```\ncode\n```\n') },
  ])
  await page.getByText(/^\d+ tokens$/).nth(1).waitFor()
  await page.getByLabel('Message', { exact: true }).evaluate((area) => {
    const clipboardData = new DataTransfer()
    clipboardData.setData('text/plain', 'iron '.repeat(1000))
    area.dispatchEvent(new ClipboardEvent('paste', { clipboardData, bubbles: true, cancelable: true }))
  })
  await page.getByText('at most').waitFor() // one long paste is more than this model's context holds
  assert.ok(await page.getByLabel('Send', { exact: true }).isDisabled())
  await page.getByLabel('Remove pasted.txt').click()
  await page.locator('.composer').evaluate((composer) => {
    const dataTransfer = new DataTransfer()
    dataTransfer.items.add(new File(['Slag flows.'], 'slag.csv'))
    for (const type of ['dragover', 'drop']) composer.dispatchEvent(new DragEvent(type, { dataTransfer, bubbles: true, cancelable: true }))
  })
  await page.getByText('slag.csv').waitFor()
  await picker.setInputFiles({ name: 'picture.png', mimeType: 'image/png', buffer: Buffer.from([0x89, 0x50, 0x4e, 0x47, 0, 1, 2]) })
  await page.getByText('picture.png is not a text file').waitFor()
  await ask(page, 'What are these?')
  const [message] = requests[0].messages
  assert.deepEqual(message.content.map((part) => part.text), [
    'File ore.txt:\n```\nOre and charcoal.\n```\n\n',
    'File notes.md:\n````\n# Notes\n\n```\ncode\n```\n````\n\n',
    'File slag.csv:\n```\nSlag flows.\n```\n\n',
    'What are these?',
  ])
  await page.getByText('ore.txt').click()
  await page.getByText('Ore and charcoal.').waitFor()
})

check('the model and its sampling defaults are shown', async (page) => {
  const defaults = { temperature: 0.2, top_p: 0.9, top_k: 0, min_p: 0, repetition_penalty: 1.05, source: 'generation_config.json' }
  const recommended = { model: 'org/better', arguments: 'org/better --quantization int4', gigabytes: 1.8, tokens_per_second: 10.2 }
  await changed(page, 'info', { sampling_defaults: defaults, demo: true, recommended_model: recommended })
  await visit(page)
  await page.getByText('This is a small demo model').waitFor()
  assert.equal((await page.locator('.demo code').innerText()).trim(), 'bloomery serve org/better --quantization int4')
  await page.getByRole('button', { name: 'speaker' }).or(page.locator('.state button')).first().click()
  await page.getByText('repetition penalty 1.05').waitFor()
  await page.getByText(/^512 tokens$|^[\d,]+ tokens$/).first().waitFor()
  const slider = (name) => page.getByLabel(`${name}, slider`).inputValue()
  assert.deepEqual([await slider('Temperature'), await slider('Top p'), await slider('Repetition penalty')], ['0.2', '0.9', '1.05'])
  assert.equal(await page.getByLabel('Temperature', { exact: true }).getAttribute('placeholder'), '0.2')
  assert.equal(await page.getByLabel('Max tokens', { exact: true }).getAttribute('placeholder'), '1024')
})

if (toolServer) {
  check('a model thinks, calls a tool, reads its result and answers', async (page) => {
    await visit(page, toolServer)
    await page.getByLabel('Settings of this chat').click()
    await page.getByRole('button', { name: 'Insert an example' }).last().click()
    await page.getByLabel('Tool choice').selectOption('required')
    await page.getByLabel('Close settings').click()
    await ask(page, 'How is the weather in Paris?')
    const card = page.getByRole('region', { name: 'Tool call get_weather' })
    assert.equal(await card.locator('pre').innerText(), '{\n  "city": "Paris"\n}')
    await page.getByRole('button', { name: /^Thought/ }).click()
    await page.getByText('I should look.').waitFor()
    await card.getByLabel('Result').fill('sunny')
    await page.keyboard.press('Enter')
    await page.getByText('It is sunny in Paris.').waitFor({ timeout: MODEL_TIMEOUT })
    assert.equal(await page.getByRole('button', { name: /^Thought/ }).count(), 2)
  })

  check('a model answers with JSON that its schema accepts', async (page) => {
    await visit(page, toolServer)
    await setSettings(page, { 'JSON schema': '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}' })
    await ask(page, 'JSON, please.')
    assert.equal(await page.locator('.code pre').innerText(), '{\n  "city": "Paris"\n}')
  })
}

// ---- what no server does on demand -------------------------------------------------------------------

check('formulas are drawn, prices and code are not', async (page) => {
  const text = [
    'With $a_1^2 + b_1^2$ and \\(\\sqrt{2}\\) it costs $5 or $10, between $100 and 200$ or US$7.', '$$\\frac{a}{b} * \\sum_{n=0}^\\infty x^n$$',
    '\\[\n\\begin{aligned}\nf(x) &= 1 \\\\\n- &= 2\n\\end{aligned}\n\\]', 'Code: `$x$ \\(y\\)`.', '```\n$$z$$\n```', 'Broken: $\\frac{1}{$ and $\\nosuch{x}$.',
  ].join('\n\n')
  const stream = await stepped(page)
  await visit(page)
  await type(page, 'Formulas, please.')
  await stream.requested
  stream.send(chunk(text.slice(0, 60)))
  await page.locator('.formula').first().waitFor()
  stream.send(chunk(text.slice(60)))
  stream.end()
  await answered(page)
  await page.locator('.formula.display').nth(1).waitFor()
  const drawn = await page.locator('.prose').evaluate((prose) => ({
    formulas: [...prose.querySelectorAll('math')].map((one) => one.namespaceURI),
    fractions: prose.querySelectorAll('mfrac').length,
    code: [...prose.querySelectorAll('code:not(.tex)')].map((one) => one.textContent),
    first: prose.querySelector('p').textContent,
    heights: [...prose.querySelectorAll('.formula.display')].map((one) => one.getBoundingClientRect().height),
  }))
  assert.equal(drawn.formulas.length, 4)
  assert.ok(drawn.formulas.every((space) => space.endsWith('MathML')))
  assert.equal(drawn.fractions, 1)
  assert.deepEqual(drawn.code, ['$x$ \\(y\\)', '$$z$$'])
  assert.ok(drawn.first.endsWith('it costs $5 or $10, between $100 and 200$ or US$7.'), drawn.first)
  assert.ok(drawn.heights.every((height) => height > 25), String(drawn.heights))
})

check('reasoning is shown while it comes and folded afterwards', async (page) => {
  const stream = await stepped(page)
  await visit(page)
  await type(page, 'Think first.')
  await stream.requested
  stream.send(delta({ reasoning_content: 'Let me see.' }))
  await page.getByText('Thinking…').waitFor()
  await page.getByText('Let me see.').waitFor()
  await page.waitForTimeout(1100)
  stream.send(chunk('Done thinking.'))
  await page.getByText(/^Thought for \d+ s$/).waitFor()
  assert.equal(await page.getByText('Let me see.').count(), 0, 'the thought is folded')
  stream.end()
  await answered(page)
  await page.getByRole('button', { name: /^Thought for/ }).click()
  await page.getByText('Let me see.').waitFor()
  await page.reload()
  await page.getByText(/^Thought for \d+ s$/).waitFor()
})

check('tool calls are cards, and their results go back', async (page) => {
  const call = (fields) => delta({ tool_calls: [{ index: 0, ...fields }] })
  const stream = await stepped(page)
  await visit(page)
  await page.getByLabel('Settings of this chat').click()
  await page.getByLabel('Tools', { exact: true }).fill('[{"name": 1}]')
  await page.getByText('Tool 1 has no “name”.').waitFor()
  await page.getByLabel('Tools', { exact: true }).fill('[{"name": "weather", "parameters": {"type": "object"}}]')
  await page.getByLabel('Tool choice').selectOption('required')
  await page.getByLabel('Close settings').click()
  const sent = page.waitForRequest('**/v1/chat/completions')
  await type(page, 'Weather in Paris?')
  const request = (await sent).postDataJSON()
  assert.deepEqual(request.tools, [{ type: 'function', function: { name: 'weather', parameters: { type: 'object' } } }])
  assert.equal(request.tool_choice, 'required')
  await stream.requested
  stream.send(call({ id: 'call_7', type: 'function', function: { name: 'weather', arguments: '' } }))
  const card = page.getByRole('region', { name: 'Tool call weather' })
  await card.waitFor()
  stream.send(call({ function: { arguments: '{"city": "Pa' } }))
  await card.getByText('{"city": "Pa').waitFor()
  stream.send(call({ function: { arguments: 'ris"}' } }))
  stream.end(ended('tool_calls'))
  await answered(page)
  assert.equal(await card.locator('pre').innerText(), '{\n  "city": "Paris"\n}')
  const requests = await scripted(page, answer('It is sunny.'))
  await card.getByLabel('Result').fill('sunny, 21 degrees')
  await page.getByRole('button', { name: 'Send results' }).click()
  await page.getByText('It is sunny.').waitFor()
  assert.deepEqual(requests[0].messages.slice(1), [
    { role: 'assistant', content: null, tool_calls: [{ id: 'call_7', type: 'function', function: { name: 'weather', arguments: '{"city": "Paris"}' } }] },
    { role: 'tool', tool_call_id: 'call_7', content: 'sunny, 21 degrees' },
  ])
})

check('a JSON schema is checked, sent, and its answer laid out', async (page) => {
  const requests = await scripted(page, answer('{"name":"iron","year":-1200}'))
  await visit(page)
  await page.getByLabel('Settings of this chat').click()
  const field = page.getByLabel('JSON schema', { exact: true })
  await field.fill('{"type": ')
  await page.getByText('This is not JSON').waitFor()
  await field.fill('{"type": "object", "properties": {"name": {"type": "string"}}}')
  await page.getByLabel('Close settings').click()
  await ask(page, 'An invention.')
  assert.deepEqual(requests[0].response_format.json_schema.schema, { type: 'object', properties: { name: { type: 'string' } } })
  assert.equal(requests[0].response_format.type, 'json_schema')
  assert.equal(await page.locator('.code pre').innerText(), '{\n  "name": "iron",\n  "year": -1200\n}')
})

check('an answer at its limit is continued', async (page) => {
  const requests = await scripted(page, answer('Once upon', 'length'), answer(' a time.'))
  await visit(page)
  await ask(page, 'A story.')
  await page.getByText('reached its limit of tokens').waitFor()
  await page.getByRole('button', { name: 'Continue', exact: true }).click()
  await page.getByText('Once upon a time.').waitFor()
  assert.equal(requests[1].continue_final_message, true)
  assert.deepEqual(requests[1].messages.at(-1), { role: 'assistant', content: 'Once upon' })
})

check('an answer that repeats itself is stopped', async (page) => {
  const stream = await stepped(page)
  await visit(page)
  await type(page, 'Loop.')
  await stream.requested
  stream.send(chunk('A fine beginning, then: '))
  const timer = setInterval(() => stream.send(chunk('the song goes on and on; ')), 15)
  await stream.closed
  clearInterval(timer)
  await page.getByText('The model repeats itself').waitFor()
  const { length } = await page.locator('.prose').innerText()
  assert.ok(length > 200 && length < 2500, String(length))
  const requests = await scripted(page, answer('Better.'))
  await page.getByRole('button', { name: 'Again, with a repetition penalty' }).click()
  await page.getByText('Better.').waitFor()
  assert.equal(requests[0].repetition_penalty, 1.1)
})

check('everything that was said can be searched', async (page) => {
  await scripted(page, answer('Bog ore becomes a bloom of iron.'), answer('Tea has less caffeine.'), answer('Nothing of note.'))
  await visit(page)
  await ask(page, 'First question')
  for (const question of ['Second question', 'Third question']) {
    await page.keyboard.press('Control+Shift+O')
    await page.getByText('What would you like to make?').waitFor()
    await ask(page, question)
  }
  await page.keyboard.press('Control+k')
  await page.keyboard.type('IRON bloom')
  await page.locator('mark').getByText('iron').waitFor()
  assert.equal(await page.locator('.hit').count(), 1)
  await page.keyboard.press('Tab')
  await page.keyboard.press('Enter')
  await page.locator('.prose').getByText('Bog ore becomes').waitFor()
  await page.getByLabel('Search conversations').fill('no such thing')
  await page.getByText('Nothing was said about that.').waitFor()
})

check('the keyboard has an overview', async (page) => {
  await visit(page)
  await page.keyboard.press('Escape')
  await page.locator('h1').click()
  await page.evaluate(() => document.activeElement.blur())
  await page.keyboard.press('?')
  const dialog = page.getByRole('dialog', { name: 'Keyboard shortcuts' })
  await dialog.getByText('Search all conversations').waitFor()
  await page.keyboard.press('Escape')
  await dialog.waitFor({ state: 'detached' })
  await page.keyboard.press('/')
  await page.keyboard.type('what?')
  assert.equal(await page.getByLabel('Message', { exact: true }).inputValue(), 'what?')
  await page.keyboard.press('Control+,')
  await page.getByLabel('Close settings').waitFor()
})

check('a hostile answer stays text', async (page) => {
  const hostile = readFileSync(new URL('hostile.md', import.meta.url), 'utf8')
  await scripted(page, hostile.split(/(?<=\n)/).map(chunk).join('') + ended())
  await visit(page)
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

check('errors are shown in place and can be retried', async (page) => {
  const requests = await scripted(page,
    { status: 429, json: { error: { message: 'The queue is full.', type: 'overloaded' } } },
    chunk('Half of ') + `data: ${JSON.stringify({ error: { message: 'The engine gave up.' } })}\n\n`,
    chunk('Half of it'), // the connection ends without [DONE]
    answer('All of it.'))
  await visit(page)
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
  assert.equal(requests.length, 4)
})

check('retry, edit, continue and the settings are sent', async (page) => {
  const requests = await scripted(page, answer('First.'), answer('Second.'), answer(' And on.'), answer('Third.'))
  await visit(page)
  await setSettings(page, { 'System prompt': 'Be brief.', Temperature: 0.5, 'Top k': 20, 'Stop at': 'END' })
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
  const [first, , third, fourth] = requests
  assert.deepEqual(first.messages, [{ role: 'system', content: 'Be brief.' }, { role: 'user', content: 'One?' }])
  assert.deepEqual([first.temperature, first.top_k, first.stop], [0.5, 20, ['END']])
  assert.deepEqual([first.stream, first.stream_options], [true, { include_usage: true, continuous_usage_stats: true }])
  assert.ok(!('top_p' in first) && !('seed' in first), 'what is not set is not sent')
  assert.equal(first.max_tokens, 1024, 'answers are bounded')
  assert.deepEqual([third.continue_final_message, third.add_generation_prompt], [true, false])
  assert.deepEqual(third.messages.at(-1), { role: 'assistant', content: 'First.' })
  assert.deepEqual(fourth.messages.at(-1), { role: 'user', content: 'Two?' })
})

check('conversations are renamed, exported, deleted and imported', async (page) => {
  await scripted(page, answer('Kept.'))
  await visit(page)
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

check('a message sent before storage is open is listed and kept', async (page) => {
  await scripted(page, answer('Kept.'))
  await page.addInitScript(() => {
    const { open } = IDBFactory.prototype
    IDBFactory.prototype.open = function (...parameters) {
      const request = open.apply(this, parameters)
      const set = (handler) => request.addEventListener('success', (event) => setTimeout(() => handler.call(request, event), 1500))
      return Object.defineProperty(request, 'onsuccess', { set })
    }
  })
  await visit(page)
  await ask(page, 'Early bird')
  await page.getByRole('link', { name: 'Early bird' }).waitFor()
  await page.waitForTimeout(2000)
  await page.reload()
  await page.getByRole('link', { name: 'Early bird' }).click()
  await page.getByText('Kept.').waitFor()
})

check('a message written while the model loads is sent when it is ready', async (page) => {
  const requests = await scripted(page, answer('At last.'))
  const loading = { state: 'loading', model: 'm', progress: 0.42, detail: 'reading weights' }
  await page.route('**/ready', (route) => route.fulfill({ status: 503, json: loading }))
  await page.goto(base)
  await page.getByText('Loading 42% · reading weights').waitFor()
  await type(page, 'Early.')
  await page.getByText('Sent when the model is ready').waitFor()
  assert.equal(requests.length, 0)
  await page.unroute('**/ready')
  await page.getByText('At last.').waitFor({ timeout: MODEL_TIMEOUT })
})

check('a LoRA adapter can be chosen as the model', async (page) => {
  const requests = await scripted(page, answer('In verse.'))
  const models = [{ id: 'speaker' }, { id: 'smith', parent: 'speaker' }, { id: 'poet', parent: 'speaker' }]
  await page.route('**/v1/models', (route) => route.fulfill({ json: { data: models } }))
  await visit(page)
  const menu = page.getByRole('combobox', { name: 'Model', exact: true })
  assert.equal(await menu.locator('optgroup').getAttribute('label'), 'LoRA adapters of speaker')
  await menu.selectOption('poet')
  await ask(page, 'Sing.')
  await page.getByText('In verse.').waitFor()
  assert.equal(requests[0].model, 'poet')
  models.push({ id: 'miner', parent: 'speaker' }) // one that was loaded meanwhile
  await menu.focus()
  await menu.locator('option', { hasText: 'miner' }).waitFor({ state: 'attached' })
  assert.equal(await menu.inputValue(), 'poet')
})

check('a key is asked for once and kept', async (page) => {
  const guarded = async (route) => {
    const given = route.request().headers().authorization
    if (given !== 'Bearer secret') return route.fulfill({ status: 401, json: { error: { message: 'Key, please.' } } })
    return route.request().url().endsWith('models')
      ? route.fulfill({ json: { data: [{ id: 'guarded' }] } })
      : route.fulfill({ contentType: 'text/event-stream', body: answer('Welcome.') })
  }
  await page.route('**/v1/**', guarded)
  await page.goto(base)
  await page.getByText('This server needs an API key').waitFor({ timeout: MODEL_TIMEOUT })
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

check('a phone of 320 pixels shows everything', async (page) => {
  const table = `| a | b | c |\n|---|---|---|\n| ${'long '.repeat(20)} | ${'y'.repeat(60)} | z |`
  const code = `\`\`\`python\n${'z = 1; '.repeat(40)}\n\`\`\``
  await scripted(page, answer(['# Wide', `\`${'x'.repeat(200)}\``, table, code].join('\n\n')))
  for (const view of ['', 'complete', 'dashboard', 'api']) {
    await page.goto(`${base}/#/${view}`)
    await page.getByLabel('Menu').waitFor()
    if (!view) await ask(page, 'Go wide.')
    await page.waitForTimeout(200)
    const tooWide = await page.locator('body, main, .log, .inside, .composer').evaluateAll((found) =>
      found.filter((one) => one.scrollWidth > 321).map((one) => one.className || one.tagName))
    assert.deepEqual(tooWide, [], view || 'chat')
  }
  await page.getByLabel('Menu').click()
  await page.getByRole('link', { name: 'Go wide.' }).click()
  await page.getByRole('heading', { name: 'Wide', exact: true }).waitFor()
  await page.locator('header').getByLabel('New chat').click()
  await page.getByText('What would you like to make?').waitFor()
  assert.ok(await page.getByLabel('Menu').isVisible(), 'the header starts a new chat, without the menu')
}, { viewport: { width: 320, height: 640 }, isMobile: true, hasTouch: true, colorScheme: 'dark' })

for (const colorScheme of ['light', 'dark']) {
  check(`axe finds nothing to complain about in ${colorScheme} colours`, async (page) => {
    const reply = 'Text with `code`, $x^2$ and a [link](https://example.org).\n\n```python\nprint(1)\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |'
    const calls = [{ index: 0, id: 'call_1', type: 'function', function: { name: 'weather', arguments: '{"city": "Paris"}' } }]
    await scripted(page,
      delta({ reasoning_content: 'Hm.' }) + answer(reply, 'length'), delta({ tool_calls: calls }) + ended('tool_calls'), { status: 429, json: { error: { message: 'Full.' } } })
    await changed(page, 'info', { demo: true })
    await visit(page)
    await audit(page, 'welcome')
    for (const question of ['One?', 'Two?', 'Three?']) await ask(page, question)
    await page.getByLabel('Settings of this chat').click()
    await page.locator('.formula').waitFor()
    await audit(page, 'chat')
    await page.keyboard.press('Escape')
    for (const [view, mark] of [['complete', '.complete'], ['dashboard', '.plot canvas'], ['api', 'pre']]) {
      await page.goto(`${base}/#/${view}`)
      await page.locator(mark).first().waitFor()
      await audit(page, view)
    }
    await page.goto(`${base}/docs#post_generate`)
    await page.getByRole('button', { name: 'Send' }).waitFor()
    await audit(page, 'docs')
  }, { colorScheme, reducedMotion: 'reduce' })
}

async function audit(page, view) {
  await page.evaluate(`globalThis.axe || (() => { ${axeSource} })()`)
  const { numRules, violations } = await page.evaluate(async () => {
    const { passes, violations } = await globalThis.axe.run({ resultTypes: ['violations'] })
    const describe = ({ id, nodes }) => `${id}: ${nodes.map((node) => `${node.target} ${node.failureSummary}`).join(' | ')}`
    return { numRules: passes.length, violations: violations.map(describe) }
  })
  assert.deepEqual(violations, [], view)
  assert.ok(numRules > 15, `${numRules} rules were checked`)
}

await runChecks()
