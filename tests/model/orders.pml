/* Two process groups whose gathers the ranks issue in different orders, without a wait at the issue
 * (unshard(async_op=True), pipeline stages). A rank must not wait where it issues a round: see
 * csrc/transport/negotiation.h. Each gather of shared memory is one step here; steps.pml has its
 * messages. */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#define PROCESS_GROUPS 2
#define IN_FLIGHT 2 /* gathers of a process group: its number of parameter groups */
#define GATHERS 7   /* of each process group */
#define TIME_LIMIT_ENDS_WAITS false
#define MAY_REACH_GLOO(kind) true

#include "negotiation.pml"

byte shared_count[ENTRIES]; /* gathers that a rank has issued over shared memory */
byte transport_of[PROCESS_GROUPS * GATHERS]; /* of a gather: 1 gloo, 2 shared memory */
bit has_died;
byte outcome[RANKS];

/* Handles of works: the number of a collective of gloo, or IN_SHM + that of a gather over shared
 * memory. */
#define IN_SHM 128
#define HAS_SHARED(r) (shared_count[ENTRY_OF(r)] > index)
#define IS_LOST_IN_SHM(r) (gone[r] && shared_count[ENTRY_OF(r)] <= index)

/* Gathers of two roots alternate. */
#ifdef SECOND_ROOT
#define IS_OF_FIRST_ROOT(gather) ((gather) % 2 == 0)
#else
#define IS_OF_FIRST_ROOT(gather) true
#endif

/* Issues gather `sent[pg]`. Plans are compared without a wait. */
inline issue_gather() {
    compare_plan(IS_OF_FIRST_ROOT(sent[pg]), false);
    if
    :: err == 0 -> run_negotiation(true)
    :: else
    fi;
    if
    :: err != 0
    :: err == 0 && state[MINE] == ACCEPTED ->
        d_step {
            assert(transport_of[pg * GATHERS + sent[pg]] != 1);
            transport_of[pg * GATHERS + sent[pg]] = 2;
            handle[pg * IN_FLIGHT + sent[pg] % IN_FLIGHT] = IN_SHM + shared_count[MINE];
            shared_count[MINE]++;
            sent[pg]++
        }
    :: err == 0 && state[MINE] != ACCEPTED ->
        gloo_issue(KIND_OF_OP);
        d_step {
            assert(transport_of[pg * GATHERS + sent[pg]] != 2);
            transport_of[pg * GATHERS + sent[pg]] = 1;
            handle[pg * IN_FLIGHT + sent[pg] % IN_FLIGHT] = index;
            index = 0;
            count_gather();
            sent[pg]++
        }
    fi
}

/* Waits for gather `received[pg]`. */
inline wait_gather() {
#ifdef SECOND_ROOT
    compare_plan(IS_OF_FIRST_ROOT(received[pg]), true);
#endif
    if
    :: err != 0
    :: err == 0 && handle[pg * IN_FLIGHT + received[pg] % IN_FLIGHT] < IN_SHM ->
        gloo_wait(handle[pg * IN_FLIGHT + received[pg] % IN_FLIGHT])
    :: err == 0 && handle[pg * IN_FLIGHT + received[pg] % IN_FLIGHT] >= IN_SHM ->
        index = handle[pg * IN_FLIGHT + received[pg] % IN_FLIGHT] - IN_SHM;
        if
        :: atomic { gone[me] -> index = 0; err = DEATH }
        :: atomic { !gone[me] && ALL(HAS_SHARED) -> index = 0 }
        :: atomic { !gone[me] && !ALL(HAS_SHARED) && ANY(IS_LOST_IN_SHM) -> index = 0; err = CLOSED }
        fi
    fi;
    if
    :: err == 0 -> received[pg]++
    :: else
    fi
}

/* Repeats a call that a signal handler interrupted. */
#define REPEAT(call) \
    do \
    :: call; \
        if \
        :: err == INTERRUPT -> err = 0 \
        :: else -> break \
        fi \
    od

#define MAY_ISSUE(g, h) (sent[g] - received[h] < IN_FLIGHT)

/* A rank issues the gathers of both process groups in any order, at most IN_FLIGHT of each, and
 * waits only after it has issued the gathers that its peers may wait for. */
proctype rank(byte me) {
    byte sent[PROCESS_GROUPS], received[PROCESS_GROUPS];
    byte handle[PROCESS_GROUPS * IN_FLIGHT];
    byte pg, index, err;
    bit equal;
    do
    :: err != 0 || received[0] + received[1] == 2 * GATHERS -> break
    :: err == 0 && gone[me] -> err = DEATH
    :: err == 0 && !gone[me] && received[0] + received[1] < 2 * GATHERS -> atomic {
        if
        :: sent[0] < GATHERS && MAY_ISSUE(0, 0) && MAY_ISSUE(0, 1) ->
            pg = 0;
            REPEAT(issue_gather())
        :: sent[1] < GATHERS && MAY_ISSUE(1, 0) && MAY_ISSUE(1, 1) ->
            pg = 1;
            REPEAT(issue_gather())
        :: sent[0] == sent[1] && received[0] < sent[0] && received[0] <= received[1] ->
            pg = 0;
            REPEAT(wait_gather())
        :: sent[0] == sent[1] && received[1] < sent[1] && received[1] <= received[0] ->
            pg = 1;
            REPEAT(wait_gather())
        fi }
    od;
    atomic {
        has_died = has_died || err == DEATH;
        outcome[me] = err;
        finished[me] = 1;
        gone[me] = 1;
        pg = 0; err = 0
    }
}

#define HAS_FINISHED(r) finished[r]

init {
    byte r;
    byte g;
    faults = FAULTS;
    atomic {
        do
        :: r < ENTRIES ->
            registered[r] = IN_FLIGHT;
            accepts[r] = 1;
            connects[r] = 1;
            plan[r] = 1;
            capabilities[r] = NONE;
            connection[r] = NONE;
#ifdef SECOND_ROOT
            later_plan[r] = NONE;
#endif
            r++
        :: else -> break
        od;
        if
        :: skip
        :: registered[0] = IN_FLIGHT + 1
        :: registered[ENTRIES - 1] = IN_FLIGHT + 1
        fi;
#ifndef SECOND_ROOT
        if /* rank 0 sends in round 1 that it waits for its first gather */
        :: skip
        :: waits[0] = 1
        fi;
#endif
        r = 0;
        do
        :: r < RANKS -> run rank(r); r++
        :: else -> break
        od;
        r = 0
    }
    cause_faults();
    ALL(HAS_FINISHED);
    d_step {
        do
        :: r < RANKS ->
            assert(has_died || outcome[r] == 0);
            r++
        :: else -> break
        od
    }
}
