import{A as e,C as t,D as n,F as r,I as i,L as a,M as o,N as s,O as c,P as l,R as u,S as d,T as f,_ as p,b as m,c as h,g,j as _,k as v,n as y,p as b,v as x,w as S,y as C}from"./index-vwW7Tjd8.js";function w(e){return[N(e),P(e),F(e),I(e)]}var T=({key:e},t,n,r=``)=>[`curl ${r}${t}`,e&&`-H "Authorization: Bearer $BLOOMERY_API_KEY"`,`-H 'Content-Type: application/json'`,`-d '${D(n)}'`].filter(Boolean).join(` \\
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
console.log((await response.json()).choices[0].message.content)`}}}function F(e){let{url:t}=e,n=`Iron is made by`;return{title:`Text generation, as TGI does it`,note:{python:`pip install huggingface_hub`,javascript:`npm install @huggingface/inference`},code:{curl:T(e,`${t}/generate`,{inputs:n,parameters:{max_new_tokens:50}}),python:`${A(e)}from huggingface_hub import InferenceClient

client = InferenceClient(${j(t)}${e.key?`, api_key=${O(e)}`:``})
for token in client.text_generation(${j(n)}, max_new_tokens=50, stream=True):
    print(token, end="", flush=True)`,javascript:`import { InferenceClient } from '@huggingface/inference'

const client = new InferenceClient(${e.key?k(e):``}).endpoint(${j(t)})
for await (const event of client.textGenerationStream({ inputs: ${j(n)}, parameters: { max_new_tokens: 50 } })) {
  process.stdout.write(event.token.text)
}`}}}function I(e){let{url:t,model:n}=e,r=[`A furnace of clay.`,`A shaft of fire.`];return{title:`Embeddings`,note:{},code:{curl:T(e,`${t}/v1/embeddings`,{model:n,input:r}),python:`${A(e)}from openai import OpenAI

client = OpenAI(base_url=${j(`${t}/v1`)}, api_key=${O(e)})
answer = client.embeddings.create(model=${j(n)}, input=${JSON.stringify(r).replace(`,`,`, `)})
print(len(answer.data), len(answer.data[0].embedding))`,javascript:`import OpenAI from 'openai'

const client = new OpenAI({ baseURL: ${j(`${t}/v1`)}, apiKey: ${k(e)} })
const answer = await client.embeddings.create({ model: ${j(n)}, input: ${JSON.stringify(r).replace(`,`,`, `)} })
console.log(answer.data.length, answer.data[0].embedding.length)`}}}var L=m(`Put your API key into <code class="svelte-own8k5">BLOOMERY_API_KEY</code> first.`,1),R=m(`<button> </button>`),z=m(`<p class="muted small svelte-own8k5"> </p>`),B=m(`<h2 class="svelte-own8k5"> </h2> <!> <!>`,1),V=m(`<div class="api svelte-own8k5"><div class="inside svelte-own8k5"><p class="muted svelte-own8k5">This server offers OpenAI’s API at <code class="svelte-own8k5"> </code> and TGI’s at <code class="svelte-own8k5"> </code>.
      All routes are in <a href="docs">the reference</a>; metrics for Prometheus are at <a href="metrics">metrics</a>. <!></p> <div class="segments svelte-own8k5" role="group" aria-label="Language"></div> <!></div></div>`);function H(d,m){r(m,!0);let T=[[`curl`,`curl`],[`python`,`Python`],[`javascript`,`JavaScript`]],E=o(`curl`),D=s(()=>w({url:h.url,model:h.name||`MODEL`,key:h.hasKey}));var O=V(),k=n(O),A=n(k),j=e(n(A)),M=v(j),N=e(j,2),P=v(N,!0),F=e(N,6),I=e=>{var t=L();i(2),C(e,t)};p(F,e=>{h.hasKey&&e(I)}),a(A);var H=e(A,2);g(H,21,()=>T,([e,t])=>e,(e,n)=>{var r=s(()=>u(S(n),2));let i=()=>S(r)[0],a=()=>S(r)[1];var o=R(),c=v(o,!0);f(()=>{b(o,`aria-pressed`,S(E)===i()),x(c,a())}),t(`click`,o,()=>_(E,i(),!0)),C(e,o)}),a(H);var U=e(H,2);g(U,17,()=>S(D),({title:e,note:t,code:n})=>e,(t,n)=>{let r=()=>S(n).title,i=()=>S(n).note,a=()=>S(n).code;var o=B(),l=c(o),u=v(l,!0),d=e(l,2),m=e=>{var t=z(),n=v(t,!0);f(()=>x(n,i()[S(E)])),C(e,t)};p(d,e=>{i()[S(E)]&&e(m)});var h=e(d,2);{let e=s(()=>S(E)===`curl`?`bash`:S(E));y(h,{get code(){return a()[S(E)]},get language(){return S(e)}})}f(()=>x(u,r())),C(t,o)}),a(k),a(O),f(()=>{x(M,`${h.url??``}/v1`),x(P,h.url)}),C(d,O),l()}d([`click`]);export{H as default};