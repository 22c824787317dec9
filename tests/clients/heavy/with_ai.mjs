// Vercel's AI SDK: text whole and streamed, completions, embeddings, an error.
import assert from 'node:assert'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { embedMany, generateText, streamText } from 'ai'

const [url, model] = process.argv.slice(2)
const provider = createOpenAICompatible({ name: 'bloomery', baseURL: `${url}/v1`, apiKey: 'x', includeUsage: true })
const wishes = { prompt: 'What is iron made from?', maxOutputTokens: 8, temperature: 0, maxRetries: 0 }

const whole = await generateText({ model: provider(model), ...wishes })
assert(whole.text.length > 0 && whole.finishReason === 'length' && whole.usage.outputTokens === 8)
const stream = streamText({ model: provider(model), ...wishes })
let text = ''
for await (const part of stream.textStream) text += part
assert.equal(text, whole.text)
assert.equal((await stream.usage).outputTokens, 8)
const completion = await generateText({ model: provider.completionModel(model), ...wishes })
assert(completion.text.length > 0)
const { embeddings } = await embedMany({ model: provider.embeddingModel(model), values: ['a cat', 'a dog'] })
assert.equal(embeddings.length, 2)
await assert.rejects(generateText({ model: provider('nobody'), ...wishes }), /not served here/)
console.log('ai: all as expected')
