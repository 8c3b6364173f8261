// The usual relay: claims unsent rows of the outbox, posts each to a URL, marks what was delivered, all in one
// transaction per batch. Woken by NOTIFY, and by a timer in case one was lost.
//
//   node relay.js URL BATCH IN_FLIGHT          PGHOST and so on name the database
'use strict';
const http = require('http');
const { Client } = require('pg');

const [url, batch, inFlight] = [process.argv[2], Number(process.argv[3]), Number(process.argv[4])];
const agent = new http.Agent({ keepAlive: true, maxSockets: inFlight, scheduling: 'fifo' });
const { hostname, port, pathname } = new URL(url);

function post(row) {
  const body = JSON.stringify(row.payload);
  const headers = { 'content-type': 'application/json', 'content-length': Buffer.byteLength(body), 'event-id': row.id };
  return new Promise((resolve, reject) => {
    const request = http.request({ agent, hostname, port, path: pathname, method: 'POST', headers }, (response) => {
      response.resume();
      response.on('end', () => (response.statusCode < 300 ? resolve(row.id) : reject(new Error(`${response.statusCode}`))));
    });
    request.on('error', reject);
    request.end(body);
  });
}

// `inFlight` posts at a time; the ids of those that got through.
async function publish(rows) {
  const delivered = [];
  let next = 0;
  const lane = async () => {
    while (next < rows.length) {
      try {
        delivered.push(await post(rows[next++]));
      } catch (error) {
        console.error(String(error)); // the row stays unsent
      }
    }
  };
  await Promise.all(Array.from({ length: Math.min(inFlight, rows.length) }, lane));
  return delivered;
}

async function drain(client) {
  for (;;) {
    await client.query('BEGIN');
    const { rows } = await client.query({
      name: 'claim',
      text: 'SELECT id, event_key, event_type, payload FROM handwritten.outbox WHERE sent_at IS NULL ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED',
      values: [batch],
    });
    if (rows.length > 0) {
      const delivered = await publish(rows);
      await client.query({
        name: 'sent',
        text: 'UPDATE handwritten.outbox SET sent_at = now() WHERE id = ANY ($1::bigint[])',
        values: [delivered],
      });
    }
    await client.query('COMMIT');
    if (rows.length === 0) return;
  }
}

async function main() {
  const client = new Client();
  await client.connect();
  let wake = () => {};
  client.on('notification', () => wake());
  await client.query('LISTEN outbox');
  for (;;) {
    let woken = false;
    const waiting = new Promise((resolve) => { wake = () => { woken = true; resolve(); }; });
    await drain(client);
    if (!woken) await Promise.race([waiting, new Promise((resolve) => setTimeout(resolve, 1000))]);
  }
}

main().catch((error) => { console.error(error); process.exit(1); });
