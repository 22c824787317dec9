// Vercel's AI SDK: full and streamed text, tools, schemas, completions, embeddings, an error.
import assert from 'node:assert'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { Output, embedMany, generateText, jsonSchema, streamText, tool } from 'ai'

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
// No reasoning: a small model would not end it.
const provider2 = createOpenAICompatible({
  name: 'bloomery', baseURL: `${url}/v1`, apiKey: 'x', includeUsage: true, supportsStructuredOutputs: true,
  transformRequestBody: body => ({ ...body, thinking_budget: 0 }),
})
const city = jsonSchema({
  type: 'object', properties: { city: { enum: ['Paris', 'Rome'] } }, required: ['city'], additionalProperties: false,
})
const tools = { get_weather: tool({ description: 'The weather of a city', inputSchema: city }) }
const request = { model: provider2(model), prompt: 'How warm is it in Paris?', maxOutputTokens: 80, temperature: 0, maxRetries: 0 }
const called = await generateText({ ...request, tools, toolChoice: 'required' })
assert(['Paris', 'Rome'].includes(called.toolCalls[0].input.city) && called.finishReason === 'tool-calls')
const streamedCall = streamText({ ...request, tools, toolChoice: 'required' })
assert.deepEqual((await streamedCall.toolCalls)[0].input, called.toolCalls[0].input)
const structured = await generateText({ ...request, output: Output.object({ schema: city }) })
assert(['Paris', 'Rome'].includes(structured.output.city))
const completion = await generateText({ model: provider.completionModel(model), ...options })
assert(completion.text.length > 0)
const { embeddings } = await embedMany({ model: provider.embeddingModel(model), values: ['a cat', 'a dog'] })
assert.equal(embeddings.length, 2)
await assert.rejects(generateText({ model: provider('unknown'), ...options }), /not served here/)
console.log('ai: all as expected')
