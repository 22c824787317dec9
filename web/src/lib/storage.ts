// Conversations in IndexedDB, one record each, so that two tabs never overwrite each other's. Knows nothing of their shape.
// Where a browser forbids storage every call fails quietly: the page then forgets on reload, and still works.

const STORE = 'conversations'
let opened: Promise<IDBDatabase> | undefined

function database(): Promise<IDBDatabase> {
  return (opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open('bloomery', 1)
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: 'id' })
    request.onsuccess = () => resolve(request.result)
    request.onerror = () => reject(request.error)
  }))
}

async function transact<T>(mode: IDBTransactionMode, work: (store: IDBObjectStore) => IDBRequest<T>): Promise<T | undefined> {
  try {
    const transaction = (await database()).transaction(STORE, mode)
    const request = work(transaction.objectStore(STORE))
    return await new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve(request.result)
      transaction.onabort = transaction.onerror = () => reject(transaction.error)
    })
  } catch (error) {
    console.warn('Conversations cannot be kept in this browser:', error)
    return undefined
  }
}

export const readAll = async (): Promise<unknown[]> => (await transact('readonly', (store) => store.getAll())) ?? []
export const read = (id: string): Promise<unknown> => transact('readonly', (store) => store.get(id))
export const write = (record: { id: string }) => transact('readwrite', (store) => store.put(record))
export const erase = (id: string) => transact('readwrite', (store) => store.delete(id))
