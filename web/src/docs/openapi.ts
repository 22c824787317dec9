// The server's OpenAPI document, read as far as the reference shows it. Knows the keywords this server writes.

export interface Schema {
  $ref?: string
  type?: string | string[]
  title?: string
  description?: string
  anyOf?: Schema[]
  items?: Schema
  enum?: unknown[]
  const?: unknown
  default?: unknown
  minimum?: number
  maximum?: number
  exclusiveMinimum?: number
  exclusiveMaximum?: number
  properties?: Record<string, Schema>
  required?: string[]
}
interface Media {
  schema?: Schema
  example?: unknown
}
export interface Operation {
  id: string
  tag: string
  method: string
  path: string
  summary: string
  guarded: boolean // needs an API key
  parameters: string[]
  body: Media | null
  answers: [string, Schema | undefined][] // by media type
}
export interface Document {
  info: { title: string; version: string; description?: string }
  paths: Record<string, Record<string, RawOperation>>
  components: { schemas: Record<string, Schema> }
}
interface RawOperation {
  operationId?: string
  tags?: string[]
  summary?: string
  security?: unknown[]
  parameters?: { name: string; in: string }[]
  requestBody?: { content: Record<string, Media> }
  responses?: Record<string, { content?: Record<string, Media> }>
}
export interface Field {
  name: string
  type: string
  range: string
  required: boolean
  fields: Field[] // of the object it holds, or of the objects in its list
}

const TAGS = ['OpenAI', 'Anthropic', 'TGI', 'Ollama', 'Tokens', 'Clouds', 'Server']
const place = (tag: string) => (TAGS.indexOf(tag) + TAGS.length + 1) % (TAGS.length + 1) // an unknown one comes last
const DEPTH = 4
const HUGE = 2 ** 31 - 1 // from here on a limit is the number format's, not ours
const TINY = 1e-300 // a least value below this says "more than zero"

/** The operations by tag, in the order people look for them. */
export function grouped(document: Document): [string, Operation[]][] {
  const groups = new Map<string, Operation[]>()
  for (const [path, methods] of Object.entries(document.paths)) {
    for (const [method, raw] of Object.entries(methods)) {
      const operation = read(path, method, raw)
      groups.set(operation.tag, [...(groups.get(operation.tag) ?? []), operation])
    }
  }
  return [...groups].sort(([a], [b]) => place(a) - place(b))
}

function read(path: string, method: string, raw: RawOperation): Operation {
  const content = raw.responses?.['200']?.content ?? {}
  return {
    id: raw.operationId ?? `${method}${path}`.replace(/\W+/g, '_'),
    tag: raw.tags?.[0] ?? 'Server',
    method: method.toUpperCase(), path, summary: raw.summary ?? '',
    guarded: !!raw.security?.length,
    parameters: (raw.parameters ?? []).filter((one) => one.in === 'path').map((one) => one.name),
    body: raw.requestBody?.content['application/json'] ?? null,
    answers: Object.entries(content).map(([media, { schema }]) => [media, schema]),
  }
}

const named = ({ components }: Document, schema: Schema): Schema | undefined =>
  schema.$ref ? components.schemas[schema.$ref.slice(schema.$ref.lastIndexOf('/') + 1)] : undefined

export function fields(document: Document, schema: Schema | undefined, depth = 0): Field[] {
  const object = schema && (named(document, schema) ?? schema)
  const found = Object.entries(object?.properties ?? {}).map(([name, field]): Field => ({
    name, type: type(field), range: range(field), required: object?.required?.includes(name) ?? false,
    fields: depth < DEPTH ? inner(document, field).flatMap((one) => fields(document, one, depth + 1)) : [],
  }))
  return found.sort((a, b) => Number(b.required) - Number(a.required)) // what is required comes first
}

/** The objects a field holds, itself or in a list. */
const inner = (document: Document, field: Schema): Schema[] =>
  (field.anyOf ?? [field]).flatMap((option) => [option, ...(option.items?.anyOf ?? (option.items ? [option.items] : []))])
    .filter((option) => named(document, option)?.properties || option.properties)

function type(schema: Schema): string {
  if (schema.anyOf) return [...new Set(schema.anyOf.map(type))].filter((name) => name !== 'null').join(' or ')
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(' or ')
  if (schema.const !== undefined) return JSON.stringify(schema.const)
  if (schema.type === 'array') return schema.items ? `list of ${type(schema.items)}` : 'list'
  if (Array.isArray(schema.type)) return schema.type.filter((name) => name !== 'null').join(' or ')
  return schema.type ?? (schema.$ref || schema.properties ? 'object' : 'anything')
}

function range(schema: Schema): string {
  const options = [schema, ...(schema.anyOf ?? [])]
  const find = (name: keyof Schema) => options.map((option) => option[name]).find((value) => typeof value === 'number')
  const low = find('minimum') as number | undefined
  const high = find('maximum') as number | undefined
  const above = low !== undefined && low > 0 && low < TINY ? 0 : find('exclusiveMinimum')
  const below = find('exclusiveMaximum')
  return [
    above !== undefined ? `> ${above}` : low !== undefined && `≥ ${low}`,
    below !== undefined ? `< ${below}` : high !== undefined && high < HUGE && `≤ ${high}`,
  ].filter(Boolean).join(', ')
}

/** A body to begin with: the document's example, or the required fields with empty values. */
export function sample(document: Document, body: Media): unknown {
  if (body.example !== undefined) return body.example
  const schema = body.schema && (named(document, body.schema) ?? body.schema)
  const empty: Record<string, unknown> = { string: '', integer: 0, number: 0, boolean: false, array: [], object: {} }
  const value = (field: Schema) => empty[String((field.anyOf?.[0] ?? field).type)] ?? {}
  return Object.fromEntries((schema?.required ?? []).map((name) => [name, value(schema!.properties![name]!)]))
}
