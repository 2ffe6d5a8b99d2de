/* The ranks of a model, and the faults that interrupt or end them at any time. RANKS is set by the
 * file that includes this one.
 *
 * Macros of the command line, in all models: WITHOUT_rule removes one rule of the C code.
 * REACH_state adds an assertion that no rank reaches this state. */
#define NONE 255

#if RANKS == 2
#define ALL(condition) (condition(0) && condition(1))
#define ANY(condition) (condition(0) || condition(1))
#else
#define ALL(condition) (condition(0) && condition(1) && condition(2))
#define ANY(condition) (condition(0) || condition(1) || condition(2))
#endif

/* Errors, as the exceptions of the C code. */
#define CLOSED 1    /* "Connection closed by peer" */
#define MISMATCH 2  /* "collective mismatch" */
#define PLAN 3      /* "different models" */
#define INTERRUPT 4 /* a signal handler raised */
#define DEATH 5     /* the process ends during the call */

bit gone[RANKS];     /* the process has ended */
bit signaled[RANKS]; /* a signal handler raises in the next wait */
byte faults;         /* that may still happen */
bit finished[RANKS];

/* Kills ranks and sends signals, at any time. */
inline cause_faults() {
    do
    :: atomic { faults > 0 && !finished[0] && !gone[0] -> faults--; gone[0] = 1 }
    :: atomic { faults > 0 && !finished[1] && !gone[1] -> faults--; gone[1] = 1 }
    :: atomic { faults > 0 && !finished[0] && !signaled[0] -> faults--; signaled[0] = 1 }
    :: atomic { faults > 0 && !finished[1] && !signaled[1] -> faults--; signaled[1] = 1 }
#if RANKS == 3
    :: atomic { faults > 0 && !finished[2] && !gone[2] -> faults--; gone[2] = 1 }
    :: atomic { faults > 0 && !finished[2] && !signaled[2] -> faults--; signaled[2] = 1 }
#endif
    :: true -> break
    od
}
