/* What every source of the native library includes. */
#ifndef PEKOE_NATIVE_H
#define PEKOE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define PEKOE_EXPORT __attribute__((visibility("default")))
#else
#define PEKOE_EXPORT
#endif

/* One copy of a function for each level of the instruction set, chosen by the dynamic linker. Results are the same to the
   bit: no contraction to fused multiply-adds (-ffp-contract=off), and sums have a fixed number of lanes. gcc knows these
   levels from 12 on, and only glibc's linker can choose. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(PEKOE_NO_CLONES)
#if __GNUC__ >= 12
#define PEKOE_HAS_LEVELS
#endif
#endif

#ifdef PEKOE_HAS_LEVELS
#define PEKOE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PEKOE_CLONES
#endif

/* Status codes: 0 is well, -1 no memory, k > 0 means that item k - 1 is at fault. */
#define PEKOE_NO_MEMORY (-1)

#endif
