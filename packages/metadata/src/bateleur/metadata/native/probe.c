/* Compiled once to test the compiler. */
#include "vec.h"
#include <omp.h>

void probe(int *threads) { *threads = omp_get_max_threads(); }
