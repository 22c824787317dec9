// Builds the page into the Python package, where the server finds it. The build is a pure function of the files in this
// folder; `manifest.json` records their hash and each asset's, so that a test without Node can tell when they differ.
import { createHash } from 'node:crypto'
import { readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { svelte } from '@sveltejs/vite-plugin-svelte'
import { defineConfig, type Plugin } from 'vite'

const root = import.meta.dirname
const output = join(root, '../src/bloomery/server/web')
const sources = ['.npmrc', 'docs.html', 'index.html', 'package-lock.json', 'package.json', 'src', 'svelte.config.js', 'tsconfig.json', 'vite.config.ts']

const sha256 = (data: string | Buffer) => createHash('sha256').update(data).digest('hex')

/** Every file under `path`, relative to `folder`, with forward slashes, in code-unit order. */
function files(folder: string, path = ''): string[] {
  const full = join(folder, path)
  if (!statSync(full).isDirectory()) return [path]
  return readdirSync(full).flatMap((name) => files(folder, path ? `${path}/${name}` : name)).sort()
}

function manifest(): Plugin {
  return {
    name: 'manifest',
    apply: 'build',
    closeBundle() {
      const hashes = (folder: string, paths: string[]) =>
        Object.fromEntries(paths.map((path) => [path, sha256(readFileSync(join(folder, path)))]))
      const inputs = hashes(root, sources.flatMap((path) => files(root, path)).sort())
      const outputs = hashes(output, files(output))
      const source = sha256(Object.entries(inputs).map(([path, hash]) => `${hash}  ${path}\n`).join(''))
      writeFileSync(join(output, 'manifest.json'), JSON.stringify({ source, files: outputs }, null, 1) + '\n')
    },
  }
}

export default defineConfig({
  base: './', // the page may live behind a proxy's prefix
  plugins: [svelte(), manifest()],
  build: {
    outDir: output,
    rollupOptions: { input: [join(root, 'index.html'), join(root, 'docs.html')] },
    emptyOutDir: true,
    target: ['chrome123', 'firefox121', 'safari17.5'],
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: true,
  },
  server: {
    proxy: Object.fromEntries(['/v1', '/ready', '/info', '/stats', '/tokenize', '/openapi.json', '/metrics'].map((path) => [path, 'http://127.0.0.1:8000'])),
  },
})
