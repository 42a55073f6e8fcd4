// A pretended GPU: device memory is host memory, and time passes only when a product runs.
#pragma once

#include <set>

struct Pretend {
  double clock = 0.0;         // milliseconds
  bool capturing = false;     // what cudaStreamIsCapturing says
  bool out_of_memory = false; // what cudaMalloc says
  int allocated = 0;          // blocks not yet freed
  int products = 0;           // products run so far
  int last_algorithm = -1;
  int sets = 0;               // attributes of products that were set
  int l2 = 0;                 // bytes that it holds
  std::set<const void*> factors;  // the second ones of products run so far
  int queries = 0;            // times the library was asked for suggestions
  double times[4] = {10.0, 5.0, 8.0, 5.01};  // milliseconds that a product takes by each of the library's suggestions
};

extern Pretend pretend;
