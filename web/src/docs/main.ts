// The entry of the API reference, a page of its own at /docs.
import { mount } from 'svelte'
import '../app.css'
import Docs from './Docs.svelte'

mount(Docs, { target: document.body })
