// TeX to MathML, which browsers draw themselves: no fonts, no pictures, no requests. Loaded with the first formula.
// The elements are made here, from known names and attributes, whatever the formula contains.
import temml from 'temml'

interface TreeNode {
  type?: string
  text?: string
  attributes?: Record<string, string>
  classes?: string[]
  style?: Record<string, string>
  children?: TreeNode[]
}
const render = (temml as unknown as { __renderToMathMLTree: (tex: string, options: object) => TreeNode }).__renderToMathMLTree

const SPACE = 'http://www.w3.org/1998/Math/MathML'
const ELEMENTS = new Set([
  'math', 'menclose', 'merror', 'mfrac', 'mi', 'mmultiscripts', 'mn', 'mo', 'mover', 'mpadded', 'mphantom', 'mprescripts', 'mroot',
  'mrow', 'ms', 'mspace', 'msqrt', 'mstyle', 'msub', 'msubsup', 'msup', 'mtable', 'mtd', 'mtext', 'mtr', 'munder', 'munderover', 'none',
])
const ATTRIBUTES = new Set([
  'accent', 'accentunder', 'columnalign', 'columnlines', 'columnspacing', 'depth', 'dir', 'display', 'displaystyle', 'fence', 'form',
  'height', 'largeop', 'linethickness', 'lspace', 'mathvariant', 'maxsize', 'minsize', 'movablelimits', 'notation', 'rowlines',
  'rowspacing', 'rspace', 'scriptlevel', 'separator', 'side', 'stretchy', 'symmetric', 'voffset', 'width',
])

/** The formula as an element; throws when it cannot be read. */
export function formula(tex: string, display: boolean): Node {
  return build(render(tex, { displayMode: display, throwOnError: true, trust: false, maxExpand: 500, maxSize: [20, 60] }))
}

function build({ type, text, attributes = {}, classes = [], style = {}, children = [] }: TreeNode): Node {
  if (text !== undefined) return document.createTextNode(text)
  const made = type && ELEMENTS.has(type) ? document.createElementNS(SPACE, type) : type ? document.createElement('span') : document.createDocumentFragment()
  if (made instanceof Element) {
    for (const [name, value] of Object.entries(attributes)) if (ATTRIBUTES.has(name)) made.setAttribute(name, value)
    if (classes.length) made.setAttribute('class', classes.join(' '))
    // Through the object model, which a content security policy without inline styles allows.
    Object.assign((made as HTMLElement).style, style)
  }
  made.append(...children.map(build))
  return made
}
