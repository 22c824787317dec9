// Colours for code, loaded when the first code block appears. Like markdown, it builds a tree and never HTML text.
import highlighter from 'highlight.js/lib/core'
import bash from 'highlight.js/lib/languages/bash'
import c from 'highlight.js/lib/languages/c'
import cpp from 'highlight.js/lib/languages/cpp'
import css from 'highlight.js/lib/languages/css'
import diff from 'highlight.js/lib/languages/diff'
import go from 'highlight.js/lib/languages/go'
import ini from 'highlight.js/lib/languages/ini'
import java from 'highlight.js/lib/languages/java'
import javascript from 'highlight.js/lib/languages/javascript'
import json from 'highlight.js/lib/languages/json'
import markdown from 'highlight.js/lib/languages/markdown'
import python from 'highlight.js/lib/languages/python'
import rust from 'highlight.js/lib/languages/rust'
import sql from 'highlight.js/lib/languages/sql'
import typescript from 'highlight.js/lib/languages/typescript'
import xml from 'highlight.js/lib/languages/xml'
import yaml from 'highlight.js/lib/languages/yaml'
import type { Element, Node } from './markdown'

const languages = { bash, c, cpp, css, diff, go, ini, java, javascript, json, markdown, python, rust, sql, typescript, xml, yaml }

/** The emitter highlight.js writes tokens to, in place of its HTML one. */
class Tree {
  #open: Node[][] = [[]]

  get nodes(): Node[] {
    return this.#open[0]!
  }
  addText(text: string) {
    if (text) this.#open.at(-1)!.push(text)
  }
  startScope(scope: string) {
    const node: Element = { tag: 'span', attributes: { class: `hljs-${scope.split('.', 1)[0]}` }, children: [] }
    this.#open.at(-1)!.push(node)
    this.#open.push(node.children!)
  }
  endScope() {
    this.#open.pop()
  }
  openNode(scope: string) {
    this.startScope(scope)
  }
  closeNode() {
    this.endScope()
  }
  __addSublanguage(other: Tree) {
    this.#open.at(-1)!.push(...other.nodes)
  }
  finalize() {}
  toHTML() {
    return ''
  }
}

highlighter.configure({ __emitter: Tree } as unknown as Parameters<typeof highlighter.configure>[0])
for (const [name, language] of Object.entries(languages)) highlighter.registerLanguage(name, language)

/** `code` in colours; null when its language is not one of ours. */
export function highlight(code: string, language: string): Node[] | null {
  if (!highlighter.getLanguage(language)) return null
  return (highlighter.highlight(code, { language, ignoreIllegals: true })._emitter as unknown as Tree).nodes
}
