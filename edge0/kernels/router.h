/* The two routing laws: a few hundred scores a token, too few for vectors or threads. */
#pragma once
#include "types.h"

/* The law of a model; `groups` is 0 for softmax, else sigmoid with groups of experts of which `kept` take part. */
typedef struct {
  int32_t k, groups, kept;
  float scale;
} Routing;

/* The largest of n scores that is not taken, whatever they hold: a choice is always of distinct ones. */
static int largest(const float *scores, const uint8_t *taken, int n) {
  int best = -1;
  for (int i = 0; i < n; i++)
    if (!taken[i] && (best < 0 || scores[i] > scores[best])) best = i;
  return best;
}

/* Takes all experts but those of the best groups, by the sum of each group's two best scores. */
static void drop_groups(const Routing *p, const float *scores, uint8_t *taken, int experts) {
  int size = experts / p->groups;
  float sums[p->groups];
  uint8_t stays[p->groups];
  for (int g = 0; g < p->groups; g++) {
    int first = largest(scores + g * size, taken + g * size, size);
    taken[g * size + first] = 1;
    int second = size > 1 ? largest(scores + g * size, taken + g * size, size) : first;
    taken[g * size + first] = 0;
    sums[g] = scores[g * size + first] + (second != first ? scores[g * size + second] : 0);
    stays[g] = 0;
  }
  for (int i = 0; i < p->kept; i++) stays[largest(sums, stays, p->groups)] = 1;
  for (int g = 0; g < p->groups; g++)
    if (!stays[g]) memset(taken + g * size, 1, size);
}

/* Of t tokens' logits [t, experts] the chosen ids [t, k], best first, and their weights; `bias` [experts] or NULL takes
   part in a choice by groups, never in a weight. Where `forced`, the ids are given. Uses scratches 3 and 4. */
static void route(Handle *h, const Routing *p, const float *logits, const float *bias, int t, int experts, int forced,
                  uint32_t *ids, float *weights) {
  float *scores = scratch(h, 3, sizeof(float) * experts);
  uint8_t *taken = scratch(h, 4, experts);
  for (int i = 0; i < t; i++, logits += experts, ids += p->k, weights += p->k) {
    if (!forced) {
      memset(taken, 0, experts);
      for (int e = 0; e < experts; e++)
        scores[e] = p->groups ? 1 / (1 + expf(-logits[e])) + (bias ? bias[e] : 0) : logits[e];
      if (p->groups > p->kept) drop_groups(p, scores, taken, experts);
      for (int j = 0; j < p->k; j++) taken[ids[j] = (uint32_t)largest(scores, taken, experts)] = 1;
    }
    float most = logits[ids[0]], sum = 0;
    for (int j = 1; j < p->k; j++) most = fmaxf(most, logits[ids[j]]);
    for (int j = 0; j < p->k; j++)
      sum += weights[j] = p->groups ? 1 / (1 + expf(-logits[ids[j]])) : expf(logits[ids[j]] - most);
    for (int j = 0; j < p->k; j++) weights[j] = p->groups ? weights[j] / (sum + 1e-20f) * p->scale : weights[j] / sum;
  }
}
