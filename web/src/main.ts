// The page's entry: styles, then the one component that holds everything.
import { mount } from 'svelte'
import App from './App.svelte'
import './app.css'

mount(App, { target: document.body })
