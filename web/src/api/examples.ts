// The API tab's texts: each thing to do, in each tool, filled with this server's address and model.

export type Tool = 'curl' | 'python' | 'javascript'
export interface Example {
  title: string
  note: Partial<Record<Tool, string>>
  code: Record<Tool, string>
}
interface Place {
  url: string
  model: string
  key: boolean
}

export function examples(place: Place): Example[] {
  return [chat(place), plain(place), schema(place), generate(place), embeddings(place)]
}

const curl = ({ key }: Place, url: string, body: object, more = '') =>
  [
    `curl ${more}${url}`,
    key && `-H "Authorization: Bearer $BLOOMERY_API_KEY"`,
    `-H 'Content-Type: application/json'`,
    `-d '${shell(body)}'`,
  ].filter(Boolean).join(' \\\n  ')
const line = (value: unknown) => JSON.stringify(value, null, 1).replace(/\n\s*/g, ' ').replace(/([[{]) | ([\]}])/g, '$1$2')
const shell = (body: object) =>
  `{\n${Object.entries(body).map(([name, value]) => `    "${name}": ${line(value)}`).join(',\n')}\n  }`.replaceAll("'", String.raw`'\''`)
const pythonKey = ({ key }: Place) => (key ? 'os.environ["BLOOMERY_API_KEY"]' : '"none"')
const scriptKey = ({ key }: Place) => (key ? 'process.env.BLOOMERY_API_KEY' : "'none'")
const imports = ({ key }: Place) => (key ? 'import os\n\n' : '')
const text = (value: string) => JSON.stringify(value)
const question = 'How did a bloomery turn ore into iron?'

function chat(place: Place): Example {
  const { url, model } = place
  return {
    title: 'Chat, streaming',
    note: { python: 'pip install openai', javascript: 'npm install openai' },
    code: {
      curl: curl(place, `${url}/v1/chat/completions`, { model, messages: [{ role: 'user', content: question }], stream: true }, '-N '),
      python: `${imports(place)}from openai import OpenAI

client = OpenAI(base_url=${text(`${url}/v1`)}, api_key=${pythonKey(place)})
stream = client.chat.completions.create(
    model=${text(model)},
    messages=[{"role": "user", "content": ${text(question)}}],
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)`,
      javascript: `import OpenAI from 'openai'

const client = new OpenAI({ baseURL: ${text(`${url}/v1`)}, apiKey: ${scriptKey(place)} })
const stream = await client.chat.completions.create({
  model: ${text(model)},
  messages: [{ role: 'user', content: ${text(question)} }],
  stream: true,
})
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta.content ?? '')`,
    },
  }
}

function plain(place: Place): Example {
  const { url, model } = place
  return {
    title: 'Chat with sampling, nothing to install',
    note: {},
    code: {
      curl: curl(place, `${url}/v1/chat/completions`, {
        model, messages: [{ role: 'user', content: question }],
        temperature: 0.7, top_p: 0.9, top_k: 40, max_tokens: 200, seed: 1,
      }),
      python: `import json
${place.key ? 'import os\n' : ''}import urllib.request

request = urllib.request.Request(
    ${text(`${url}/v1/chat/completions`)},
    data=json.dumps({
        "model": ${text(model)},
        "messages": [{"role": "user", "content": ${text(question)}}],
        "temperature": 0.7,
        "max_tokens": 200,
    }).encode(),
    headers={"Content-Type": "application/json"${place.key ? ', "Authorization": f"Bearer {os.environ[\'BLOOMERY_API_KEY\']}"' : ''}},
)
with urllib.request.urlopen(request) as response:
    print(json.load(response)["choices"][0]["message"]["content"])`,
      javascript: `const response = await fetch(${text(`${url}/v1/chat/completions`)}, {
  method: 'POST',
  headers: { 'Content-Type': 'application/json'${place.key ? ', Authorization: `Bearer ${process.env.BLOOMERY_API_KEY}`' : ''} },
  body: JSON.stringify({
    model: ${text(model)},
    messages: [{ role: 'user', content: ${text(question)} }],
    temperature: 0.7,
    max_tokens: 200,
  }),
})
console.log((await response.json()).choices[0].message.content)`,
    },
  }
}

function schema(place: Place): Example {
  const { url, model } = place
  const shape = {
    type: 'object', properties: { name: { type: 'string' }, year: { type: 'integer' } }, required: ['name', 'year'], additionalProperties: false,
  }
  const wanted = 'Name an invention and the year it was made.'
  const format = { type: 'json_schema', json_schema: { name: 'invention', schema: shape, strict: true } }
  return {
    title: 'JSON by a schema',
    note: { python: 'pip install openai', javascript: 'npm install openai' },
    code: {
      curl: curl(place, `${url}/v1/chat/completions`, { model, messages: [{ role: 'user', content: wanted }], response_format: format }),
      python: `${imports(place)}from openai import OpenAI
from pydantic import BaseModel


class Invention(BaseModel):
    name: str
    year: int


client = OpenAI(base_url=${text(`${url}/v1`)}, api_key=${pythonKey(place)})
answer = client.chat.completions.parse(
    model=${text(model)},
    messages=[{"role": "user", "content": ${text(wanted)}}],
    response_format=Invention,
)
print(answer.choices[0].message.parsed)`,
      javascript: `import OpenAI from 'openai'

const client = new OpenAI({ baseURL: ${text(`${url}/v1`)}, apiKey: ${scriptKey(place)} })
const schema = ${line(shape)}
const answer = await client.chat.completions.create({
  model: ${text(model)},
  messages: [{ role: 'user', content: ${text(wanted)} }],
  response_format: { type: 'json_schema', json_schema: { name: 'invention', schema, strict: true } },
})
console.log(JSON.parse(answer.choices[0].message.content))`,
    },
  }
}

function generate(place: Place): Example {
  const { url } = place
  const inputs = 'Iron is made by'
  return {
    title: 'Text generation, as TGI does it',
    note: { python: 'pip install huggingface_hub', javascript: 'npm install @huggingface/inference' },
    code: {
      curl: curl(place, `${url}/generate`, { inputs, parameters: { max_new_tokens: 50 } }),
      python: `${imports(place)}from huggingface_hub import InferenceClient

client = InferenceClient(${text(url)}${place.key ? `, api_key=${pythonKey(place)}` : ''})
for token in client.text_generation(${text(inputs)}, max_new_tokens=50, stream=True):
    print(token, end="", flush=True)`,
      javascript: `import { InferenceClient } from '@huggingface/inference'

const client = new InferenceClient(${place.key ? scriptKey(place) : ''}).endpoint(${text(url)})
for await (const event of client.textGenerationStream({ inputs: ${text(inputs)}, parameters: { max_new_tokens: 50 } })) {
  process.stdout.write(event.token.text)
}`,
    },
  }
}

function embeddings(place: Place): Example {
  const { url, model } = place
  const input = ['A furnace of clay.', 'A shaft of fire.']
  return {
    title: 'Embeddings',
    note: {},
    code: {
      curl: curl(place, `${url}/v1/embeddings`, { model, input }),
      python: `${imports(place)}from openai import OpenAI

client = OpenAI(base_url=${text(`${url}/v1`)}, api_key=${pythonKey(place)})
answer = client.embeddings.create(model=${text(model)}, input=${JSON.stringify(input).replace(',', ', ')})
print(len(answer.data), len(answer.data[0].embedding))`,
      javascript: `import OpenAI from 'openai'

const client = new OpenAI({ baseURL: ${text(`${url}/v1`)}, apiKey: ${scriptKey(place)} })
const answer = await client.embeddings.create({ model: ${text(model)}, input: ${JSON.stringify(input).replace(',', ', ')} })
console.log(answer.data.length, answer.data[0].embedding.length)`,
    },
  }
}
