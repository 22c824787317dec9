import{$ as e,D as t,G as n,H as r,J as i,L as a,N as o,P as s,Q as c,S as l,T as u,U as d,W as f,X as p,b as m,it as h,k as g,nt as _,q as v,tt as y,u as b,z as x}from"./disclose-version-DVPM8bIX.js";import{a as S,v as C}from"./app-CHSicaVZ.js";function w(e){return[N(e),P(e),F(e),I(e),L(e)]}var T=({key:e},t,n,r=``)=>[`curl ${r}${t}`,e&&`-H "Authorization: Bearer $BLOOMERY_API_KEY"`,`-H 'Content-Type: application/json'`,`-d '${D(n)}'`].filter(Boolean).join(` \\
  `),E=e=>JSON.stringify(e,null,1).replace(/\n\s*/g,` `).replace(/([[{]) | ([\]}])/g,`$1$2`),D=e=>`{\n${Object.entries(e).map(([e,t])=>`    "${e}": ${E(t)}`).join(`,
`)}\n  }`.replaceAll(`'`,String.raw`'\''`),O=({key:e})=>e?`os.environ["BLOOMERY_API_KEY"]`:`"none"`,k=({key:e})=>e?`process.env.BLOOMERY_API_KEY`:`'none'`,A=({key:e})=>e?`import os

`:``,j=e=>JSON.stringify(e),M=`How did a bloomery turn ore into iron?`;function N(e){let{url:t,model:n}=e;return{title:`Chat, streaming`,note:{python:`pip install openai`,javascript:`npm install openai`},code:{curl:T(e,`${t}/v1/chat/completions`,{model:n,messages:[{role:`user`,content:M}],stream:!0},`-N `),python:`${A(e)}from openai import OpenAI

client = OpenAI(base_url=${j(`${t}/v1`)}, api_key=${O(e)})
stream = client.chat.completions.create(
    model=${j(n)},
    messages=[{"role": "user", "content": ${j(M)}}],
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)`,javascript:`import OpenAI from 'openai'

const client = new OpenAI({ baseURL: ${j(`${t}/v1`)}, apiKey: ${k(e)} })
const stream = await client.chat.completions.create({
  model: ${j(n)},
  messages: [{ role: 'user', content: ${j(M)} }],
  stream: true,
})
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta.content ?? '')`}}}function P(e){let{url:t,model:n}=e;return{title:`Chat with sampling, nothing to install`,note:{},code:{curl:T(e,`${t}/v1/chat/completions`,{model:n,messages:[{role:`user`,content:M}],temperature:.7,top_p:.9,top_k:40,max_tokens:200,seed:1}),python:`import json
${e.key?`import os
`:``}import urllib.request

request = urllib.request.Request(
    ${j(`${t}/v1/chat/completions`)},
    data=json.dumps({
        "model": ${j(n)},
        "messages": [{"role": "user", "content": ${j(M)}}],
        "temperature": 0.7,
        "max_tokens": 200,
    }).encode(),
    headers={"Content-Type": "application/json"${e.key?`, "Authorization": f"Bearer {os.environ['BLOOMERY_API_KEY']}"`:``}},
)
with urllib.request.urlopen(request) as response:
    print(json.load(response)["choices"][0]["message"]["content"])`,javascript:`const response = await fetch(${j(`${t}/v1/chat/completions`)}, {
  method: 'POST',
  headers: { 'Content-Type': 'application/json'${e.key?", Authorization: `Bearer ${process.env.BLOOMERY_API_KEY}`":``} },
  body: JSON.stringify({
    model: ${j(n)},
    messages: [{ role: 'user', content: ${j(M)} }],
    temperature: 0.7,
    max_tokens: 200,
  }),
})
console.log((await response.json()).choices[0].message.content)`}}}function F(e){let{url:t,model:n}=e,r={type:`object`,properties:{name:{type:`string`},year:{type:`integer`}},required:[`name`,`year`],additionalProperties:!1},i=`Name an invention and the year it was made.`,a={type:`json_schema`,json_schema:{name:`invention`,schema:r,strict:!0}};return{title:`JSON by a schema`,note:{python:`pip install openai`,javascript:`npm install openai`},code:{curl:T(e,`${t}/v1/chat/completions`,{model:n,messages:[{role:`user`,content:i}],response_format:a}),python:`${A(e)}from openai import OpenAI
from pydantic import BaseModel


class Invention(BaseModel):
    name: str
    year: int


client = OpenAI(base_url=${j(`${t}/v1`)}, api_key=${O(e)})
answer = client.chat.completions.parse(
    model=${j(n)},
    messages=[{"role": "user", "content": ${j(i)}}],
    response_format=Invention,
)
print(answer.choices[0].message.parsed)`,javascript:`import OpenAI from 'openai'

const client = new OpenAI({ baseURL: ${j(`${t}/v1`)}, apiKey: ${k(e)} })
const schema = ${E(r)}
const answer = await client.chat.completions.create({
  model: ${j(n)},
  messages: [{ role: 'user', content: ${j(i)} }],
  response_format: { type: 'json_schema', json_schema: { name: 'invention', schema, strict: true } },
})
console.log(JSON.parse(answer.choices[0].message.content))`}}}function I(e){let{url:t}=e,n=`Iron is made by`;return{title:`Text generation, as TGI does it`,note:{python:`pip install huggingface_hub`,javascript:`npm install @huggingface/inference`},code:{curl:T(e,`${t}/generate`,{inputs:n,parameters:{max_new_tokens:50}}),python:`${A(e)}from huggingface_hub import InferenceClient

client = InferenceClient(${j(t)}${e.key?`, api_key=${O(e)}`:``})
for token in client.text_generation(${j(n)}, max_new_tokens=50, stream=True):
    print(token, end="", flush=True)`,javascript:`import { InferenceClient } from '@huggingface/inference'

const client = new InferenceClient(${e.key?k(e):``}).endpoint(${j(t)})
for await (const event of client.textGenerationStream({ inputs: ${j(n)}, parameters: { max_new_tokens: 50 } })) {
  process.stdout.write(event.token.text)
}`}}}function L(e){let{url:t,model:n}=e,r=[`A furnace of clay.`,`A shaft of fire.`];return{title:`Embeddings`,note:{},code:{curl:T(e,`${t}/v1/embeddings`,{model:n,input:r}),python:`${A(e)}from openai import OpenAI

client = OpenAI(base_url=${j(`${t}/v1`)}, api_key=${O(e)})
answer = client.embeddings.create(model=${j(n)}, input=${JSON.stringify(r).replace(`,`,`, `)})
print(len(answer.data), len(answer.data[0].embedding))`,javascript:`import OpenAI from 'openai'

const client = new OpenAI({ baseURL: ${j(`${t}/v1`)}, apiKey: ${k(e)} })
const answer = await client.embeddings.create({ model: ${j(n)}, input: ${JSON.stringify(r).replace(`,`,`, `)} })
console.log(answer.data.length, answer.data[0].embedding.length)`}}}var R=g(`Put your API key into <code class="svelte-own8k5">BLOOMERY_API_KEY</code> first.`,1),z=g(`<button> </button>`),B=g(`<p class="muted small svelte-own8k5"> </p>`),V=g(`<h2 class="svelte-own8k5"> </h2> <!> <!>`,1),H=g(`<div class="api svelte-own8k5"><div class="inside svelte-own8k5"><p class="muted svelte-own8k5">This server offers OpenAI’s API at <code class="svelte-own8k5"> </code>, Anthropic’s, Ollama’s and TGI’s at <code class="svelte-own8k5"> </code>.
      All routes are in <a href="docs">the reference</a>, where you can try them; metrics for Prometheus are at <a href="metrics">metrics</a>. <!></p> <div class="segments svelte-own8k5" role="group" aria-label="Language"></div> <!></div></div>`);function U(o,g){e(g,!0);let T=[[`curl`,`curl`],[`python`,`Python`],[`javascript`,`JavaScript`]],E=i(`curl`),D=p(()=>w({url:C.url,model:C.name||`MODEL`,key:C.hasKey}));var O=H(),k=r(O),A=r(k),j=n(r(A)),M=f(j),N=n(j,2),P=f(N,!0),F=n(N,6),I=e=>{var n=R();y(2),t(e,n)};l(F,e=>{C.hasKey&&e(I)}),_(A);var L=n(A,2);m(L,21,()=>T,([e,t])=>e,(e,n)=>{var r=p(()=>h(a(n),2));let i=()=>a(r)[0],o=()=>a(r)[1];var c=z(),l=f(c,!0);x(()=>{b(c,`aria-pressed`,a(E)===i()),u(l,o())}),s(`click`,c,()=>v(E,i(),!0)),t(e,c)}),_(L);var U=n(L,2);m(U,17,()=>a(D),({title:e,note:t,code:n})=>e,(e,r)=>{let i=()=>a(r).title,o=()=>a(r).note,s=()=>a(r).code;var c=V(),m=d(c),h=f(m,!0),g=n(m,2),_=e=>{var n=B(),r=f(n,!0);x(()=>u(r,o()[a(E)])),t(e,n)};l(g,e=>{o()[a(E)]&&e(_)});var v=n(g,2);{let e=p(()=>a(E)===`curl`?`bash`:a(E));S(v,{get code(){return s()[a(E)]},get language(){return a(e)}})}x(()=>u(h,i())),t(e,c)}),_(k),_(O),x(()=>{u(M,`${C.url??``}/v1`),u(P,C.url)}),t(o,O),c()}o([`click`]);export{U as default};