// The router of a deployment (twostroke/cluster/core.py): which worker computes a prompt and which writes the answer.
#pragma once
#include "names.h"

class RouterCore;

// What a worker reports of itself.
struct WorkerReport {
    bool writes, helps;
    int64_t queued, streams, max_streams;
    double token, step, stream;  // seconds
    int64_t blocks;
};

// What the router knows of a worker. Mirrored in library.py.
struct WorkerStanding {
    double wait, place;
    int64_t sent_tokens, sent_streams, names, blocks;
};

struct LinkTimes {
    double latency, block;  // seconds
};

struct RouterAsk {
    int64_t tokens;
    Names names;
    double due;
    bool apart;
    int32_t but;      // a worker that is not asked, or a number that none has
    LinkTimes link, prefix;
    bool fetches;     // by `prefix`
};

// Mirrored in library.py.
struct RouterAnswer {
    double ttft, second, cost;
    int64_t cached, sent, fetched;
    int32_t prefill, decode, source, unused;
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

// False: no worker can write the answer.
bool router_choose(RouterCore& router, const RouterAsk& ask, RouterAnswer& answer);
