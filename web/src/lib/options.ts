// What a conversation asks for beside sampling, from the JSON the reader wrote to what the API takes.
import type { ChatOptions } from './conversation'

export interface Tool {
  type: 'function'
  function: { name: string; description?: string; parameters?: object }
}
export interface Read<T> {
  value: T | null // null: nothing written, or an error
  error: string
}

const isObject = (value: unknown): value is Record<string, unknown> => typeof value === 'object' && value !== null && !Array.isArray(value)

function parsed<T>(text: string, check: (value: unknown) => T): Read<T> {
  if (!text.trim()) return { value: null, error: '' }
  try {
    return { value: check(JSON.parse(text)), error: '' }
  } catch (error) {
    return { value: null, error: error instanceof SyntaxError ? `This is not JSON: ${error.message}` : (error as Error).message }
  }
}

/** Tools: OpenAI's form, or functions alone. */
export const readTools = (text: string): Read<Tool[]> => parsed(text, (value) => {
  const list = Array.isArray(value) ? value : [value]
  if (!list.length) throw new Error('The list is empty.')
  return list.map((one, index): Tool => {
    const called = isObject(one) && isObject(one.function) ? one.function : one
    if (!isObject(called) || typeof called.name !== 'string' || !called.name) throw new Error(`Tool ${index + 1} has no “name”.`)
    if (called.parameters !== undefined && !isObject(called.parameters)) throw new Error(`“parameters” of ${called.name} must be a JSON schema.`)
    return { type: 'function', function: called as Tool['function'] }
  })
})

/** A JSON schema, alone or as OpenAI wraps it. */
export const readSchema = (text: string): Read<object> => parsed(text, (value) => {
  const schema = isObject(value) && isObject(value.schema) && !('type' in value && value.type === 'object') ? value.schema : value
  if (!isObject(schema)) throw new Error('A JSON schema is an object, such as {"type": "object", "properties": {…}}.')
  return schema
})

/** The request's fields. What cannot be read is an error here, never a request without it. */
export function optionFields({ tools, toolChoice, schema, thinking }: ChatOptions): Record<string, unknown> {
  const called = readTools(tools)
  const wanted = readSchema(schema)
  if (called.error) throw new Error(`The tools in the settings cannot be read. ${called.error}`)
  if (wanted.error) throw new Error(`The JSON schema in the settings cannot be read. ${wanted.error}`)
  return {
    ...(called.value && { tools: called.value, ...(toolChoice !== 'auto' && { tool_choice: toolChoice }) }),
    ...(wanted.value && { response_format: { type: 'json_schema', json_schema: { name: 'answer', schema: wanted.value, strict: true } } }),
    ...(thinking !== 'default' && { chat_template_kwargs: { enable_thinking: thinking === 'on' } }),
  }
}

/** JSON laid out for people; unfinished JSON as it is. */
export function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2)
  } catch {
    return text
  }
}
