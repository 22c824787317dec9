// Markdown to a tree of elements, never to HTML text: what a model writes can only become what `inline` and `block` below
// build, whatever it contains. Raw HTML stays text, images become links, and links go to http, https and mailto only.
import { Lexer, Tokenizer, type MarkedOptions, type Token, type Tokens } from 'marked'

export type Node = string | Element | Code | Formula
export interface Element {
  tag: string
  attributes?: Record<string, string | number | undefined>
  children?: Node[]
}
export interface Code {
  code: string
  language: string
}
export interface Formula {
  tex: string
  display: boolean
}
export interface Block {
  source: string
  nodes: Node[]
}

/** Setext headings would flash up whenever a list or a rule begins below a paragraph. */
class Grammar extends Tokenizer {
  override lheading() {
    return undefined
  }
}

type Math = Tokens.Generic & { text: string; display: boolean }
const math = (raw: string, text: string, display: boolean): Math => ({ type: 'math', raw, text: text.trim(), display })

/** A display formula on lines of its own, which may hold what would be lists or rules in markdown. */
function displayed(source: string): Math | undefined {
  const match = /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n+|$)/.exec(source)
  return match ? math(match[0], match[1] ?? match[2] ?? '', true) : undefined
}

/** A formula within a line. One dollar sign is a price unless it hugs its formula as TeX writers do. */
function inlined(source: string): Math | undefined {
  const marked = /^\\(?:\(([\s\S]+?)\\\)|\[([\s\S]+?)\\\])|^\$\$([^$]+?)\$\$/.exec(source)
  if (marked) return math(marked[0], marked[1] ?? marked[2] ?? marked[3] ?? '', marked[1] === undefined)
  const single = /^\$(?![\s$])((?:\\[\s\S]|[^\\$\n])*?)(?<![\s\\])\$(?![\d$\w])/.exec(source)
  if (!single || isPrice(single[1]!)) return undefined
  return math(single[0], single[1]!, false)
}

/** "$100 and 200$" and "$5 a piece or 3$": a number, then words, is talk about money. */
const isPrice = (text: string) => /^\d[\d.,]*\s*(?:[-–]\s*)?[A-Za-z]{2,}/.test(text) || /^[\d.,\s]+[kKmMbB]?\s+[a-z]+\s/.test(text)

/** Where a formula may begin; a dollar sign inside a word or behind another is none. */
const begins = (source: string) => {
  const found = /\\[([]|(?<![\w$\\])\$(?!\s)/.exec(source)
  return found ? found.index : -1
}
const beginsBlock = (source: string) => {
  const found = /(?<=\n) {0,3}(?:\$\$|\\\[)/.exec(source)
  return found && displayed(source.slice(found.index)) ? found.index : -1
}

const options: MarkedOptions = {
  gfm: true,
  tokenizer: new Grammar(),
  extensions: {
    renderers: {}, childTokens: {}, block: [displayed], inline: [inlined], startBlock: [beginsBlock], startInline: [begins],
  },
}

/** The blocks of `text`. While it is unfinished those unchanged since `before` are the same objects: only the last is drawn. */
export function blocks(text: string, unfinished: boolean, before: Block[]): Block[] {
  const tokens = Lexer.lex(unfinished ? healed(text) : text, options).filter(visible)
  return tokens.map((token, index) => {
    const known = before[index]
    return known && unfinished && known.source === token.raw ? known : { source: token.raw, nodes: [block(token)] }
  })
}

const visible = (token: Token) => token.type !== 'space' && token.type !== 'def'
const element = (tag: string, children: Node[], attributes?: Element['attributes']): Element => ({ tag, children, attributes })

function block(token: Token): Node {
  switch (token.type) {
    case 'heading':
      return heading(token as Tokens.Heading)
    case 'paragraph':
      return element('p', inline(token.tokens))
    case 'blockquote':
      return element('blockquote', flow(token.tokens))
    case 'code':
      return { code: token.text, language: (token.lang ?? '').trim().split(/\s/, 1)[0] }
    case 'list':
      return element(token.ordered ? 'ol' : 'ul', (token as Tokens.List).items.map((item) => element('li', flow(item.tokens))),
        { start: token.ordered && token.start !== 1 ? token.start : undefined })
    case 'table':
      return table(token as Tokens.Table)
    case 'math':
      return element('p', [{ tex: token.text, display: true }])
    case 'hr':
      return { tag: 'hr' }
    case 'text':
      return element('span', token.tokens ? inline(token.tokens) : [decoded(token.text)])
    case 'checkbox':
      return token.checked ? '☑ ' : '☐ '
    default:
      return element('p', [token.raw.trimEnd()])
  }
}

const flow = (tokens: Token[] = []): Node[] => tokens.filter(visible).map(block)

/** The turn itself is headed by an h2: what it contains lies below. */
const heading = ({ depth, tokens }: Tokens.Heading) =>
  element(`h${Math.min(6, Math.max(3, depth + 1))}`, inline(tokens), { class: depth === 1 ? 'title' : undefined })

function table({ header, rows }: Tokens.Table): Node {
  const row = (cells: Tokens.TableCell[], tag: string) =>
    element('tr', cells.map((cell) => element(tag, inline(cell.tokens), { class: cell.align ? `align-${cell.align}` : undefined })))
  const body = rows.map((cells) => row(cells, 'td'))
  return element('div', [element('table', [element('thead', [row(header, 'th')]), element('tbody', body)])], { class: 'table' })
}

const inline = (tokens: Token[] = []): Node[] => tokens.flatMap((token): Node[] => {
  switch (token.type) {
    case 'strong':
    case 'em':
    case 'del':
      return [element(token.type, inline(token.tokens))]
    case 'codespan':
      return [element('code', [token.text])]
    case 'math':
      return [{ tex: token.text, display: token.display }]
    case 'br':
      return [{ tag: 'br' }]
    case 'link':
      return link(token.href, inline(token.tokens))
    case 'image':
      return link(token.href, [`Image: ${decoded(token.text) || token.href}`])
    case 'html':
      return /^<br\s*\/?>$/i.test(token.text) ? [{ tag: 'br' }] : [token.text]
    default:
      return 'tokens' in token && token.tokens ? inline(token.tokens) : [decoded('text' in token ? token.text : token.raw)]
  }
})

/** A link opens elsewhere and tells nobody where it came from; one that leads nowhere safe is only its text. */
function link(target: string, children: Node[]): Node[] {
  const href = URL.canParse(target) ? new URL(target) : null
  if (!href || !['http:', 'https:', 'mailto:'].includes(href.protocol)) return children
  return [element('a', children, { href: href.href, target: '_blank', rel: 'noopener noreferrer nofollow', title: href.href })]
}

const entity = /&(#\d{1,7}|#x[\da-f]{1,6}|[a-z][a-z\d]{1,30});/gi
const scratch = document.createElement('textarea')

/** Character references as characters; only a matched reference is ever parsed. */
const decoded = (text: string) =>
  text.replace(entity, (reference) => {
    scratch.innerHTML = reference
    return scratch.value
  })

/** `text` with what is still open at its end closed, so that a half-written **bold** or [link](… does not flash its marks. */
export function healed(text: string): string {
  const fences = [...text.matchAll(/^ {0,3}(```|~~~).*$/gm)]
  const last = fences.at(-1)
  if (fences.length % 2) return text.replace(/\n[`~]{1,2}$/, '')
  const start = Math.max(text.lastIndexOf('\n\n') + 1, last ? last.index + last[0].length : 0)
  return text.slice(0, start) + closed(tabled(text.slice(start)))
}

/** What closes the display formula or the bracketed one that `tail` ends in; empty when none is open. */
function openFormula(tail: string): string {
  const plain = tail.replace(/`[^`\n]*`/g, '')
  if ((plain.match(/\$\$/g)?.length ?? 0) % 2) return '$$'
  const last = plain.match(/\\[()[\]]/g)?.at(-1)
  return last === '\\(' ? '\\)' : last === '\\[' ? '\\]' : ''
}

function closed(tail: string): string {
  const close = openFormula(tail)
  if (close) return tail.replace(/[\\$]$/, '') + close
  return closeMarks(tail)
}

function closeMarks(tail: string): string {
  const plain = tail.replace(/`[^`\n]+`/g, '')
  if (/`[^`]+$/.test(plain)) return `${tail}\``
  const begun = plain.endsWith('`') ? tail.replace(/`+$/, '') : tail
  const shown = begun.replace(/!?\[([^\]\n]*)(\]\([^)\n]*|\])?$/, '$1').replace(/[*_~]+$/, '')
  const marks = shown.replace(/`[^`\n]+`/g, '')
  const bold = (marks.match(/\*\*/g)?.length ?? 0) % 2 ? '**' : ''
  const single = marks.replaceAll('**', '')
  const opened = single.match(/(?<![\w*\\])\*(?=[^\s*])/g)?.length ?? 0
  const ended = single.match(/(?<=[^\s*\\])\*(?![\w*])/g)?.length ?? 0
  const struck = (marks.match(/~~/g)?.length ?? 0) % 2 ? '~~' : ''
  const close = struck + (opened > ended ? '*' : '') + bold
  return close ? shown.trimEnd() + close : shown
}

/** A table is a table from its first row on, before the rule below it has come. */
function tabled(tail: string): string {
  const [head, rule, ...more] = tail.trim().split('\n')
  if (!head?.startsWith('|') || more.length || (rule !== undefined && !/^[|:\-\s]*$/.test(rule))) return tail
  const row = head.endsWith('|') && head.length > 1 ? head : `${head} |`
  return `\n${row}\n|${'---|'.repeat(row.split('|').length - 2)}`
}
