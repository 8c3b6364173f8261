#!/usr/bin/python3
"""A consumer of PgQ that posts each event to a URL, and the ticker that it needs, ten times a second.

    pgq.py URL QUEUE CONSUMER          PGHOST and so on name the database
"""
import http.client
import sys
import time
import urllib.parse

import psycopg2

TICK = 0.1


def main():
    url, queue, consumer = urllib.parse.urlsplit(sys.argv[1]), sys.argv[2], sys.argv[3]
    far_side = http.client.HTTPConnection(url.hostname, url.port)
    connection = psycopg2.connect("")
    connection.autocommit = True
    sql = connection.cursor()
    next_tick = time.monotonic()
    while True:
        sql.execute("SELECT pgq.ticker(%s)", (queue,))
        sql.execute("SELECT pgq.next_batch(%s, %s)", (queue, consumer))
        while (batch := sql.fetchone()[0]) is not None:
            sql.execute("SELECT ev_data FROM pgq.get_batch_events(%s)", (batch,))
            for (body,) in sql.fetchall():
                far_side.request("POST", url.path, body, {"Content-Type": "application/json"})
                answer = far_side.getresponse()
                answer.read()
                if answer.status >= 300:
                    raise SystemExit(f"the far side answered {answer.status}")
            sql.execute("SELECT pgq.finish_batch(%s)", (batch,))
            sql.execute("SELECT pgq.next_batch(%s, %s)", (queue, consumer))
        next_tick += TICK
        time.sleep(max(0.0, next_tick - time.monotonic()))


main()
