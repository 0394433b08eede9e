// The router of a deployment (twostroke/cluster/core.py): which worker computes a prompt and which writes the answer.
#pragma once
#include "names.h"

class RouterCore;

// What a worker reports of itself. Mirrored in library.py.
struct WorkerReport {
    int32_t writes, helps;  // or 0
    int64_t queued, streams, max_streams;
    double token, step, stream;  // seconds
    int64_t blocks;
};

// What the router knows of a worker. Mirrored in library.py.
struct WorkerStanding {
    double wait, place;
    int64_t sent_tokens, sent_streams, names, blocks;
};

// A request, and the ways between workers now. Mirrored in library.py.
struct RouterAsk {
    int32_t apart, but;  // but: a worker that is not asked, or a number that none has
    int64_t tokens;
    double due;
    double latency, block;                // seconds: of a transfer to the writer, and of each block
    double fetch_latency, fetch_block;    // of blocks that are fetched before; latency below 0: none are
};

// Mirrored in library.py.
struct RouterAnswer {
    int32_t prefill, decode, source, unused;  // prefill below 0: no worker can write the answer. source: -1 for none
    double ttft, second, cost;
    int64_t cached, sent, fetched;
};

RouterCore* make_router();
void free_router(RouterCore* router);

// A worker joins, or reports anew. Numbers count up from 0 in the order in which workers join.
void router_update(RouterCore& router, int32_t number, const WorkerReport& report);

// The same as the methods of the core in Python. A number that no worker has is ignored.
void router_pause(RouterCore& router, int32_t number);
void router_lost(RouterCore& router, int32_t number);
void router_stored(RouterCore& router, int32_t number, const Names& names);
int64_t router_cached(RouterCore& router, int32_t number, const Names& names);
WorkerStanding router_standing(RouterCore& router, int32_t number);

RouterAnswer router_choose(RouterCore& router, const Names& names, const RouterAsk& ask);
