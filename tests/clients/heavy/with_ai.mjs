// Vercel's AI SDK: full and streamed text, completions, embeddings, an error.
import assert from 'node:assert'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { embedMany, generateText, streamText } from 'ai'

const [url, model] = process.argv.slice(2)
const provider = createOpenAICompatible({ name: 'bloomery', baseURL: `${url}/v1`, apiKey: 'x', includeUsage: true })
const options = { prompt: 'What is iron made from?', maxOutputTokens: 8, temperature: 0, maxRetries: 0 }

const full = await generateText({ model: provider(model), ...options })
assert(full.text.length > 0 && full.finishReason === 'length' && full.usage.outputTokens === 8)
const stream = streamText({ model: provider(model), ...options })
let text = ''
for await (const part of stream.textStream) text += part
assert.equal(text, full.text)
assert.equal((await stream.usage).outputTokens, 8)
const completion = await generateText({ model: provider.completionModel(model), ...options })
assert(completion.text.length > 0)
const { embeddings } = await embedMany({ model: provider.embeddingModel(model), values: ['a cat', 'a dog'] })
assert.equal(embeddings.length, 2)
await assert.rejects(generateText({ model: provider('unknown'), ...options }), /not served here/)
console.log('ai: all as expected')
