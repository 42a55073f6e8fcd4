// Players from the descriptions that te_compile/kernels/player.py gives of tapes.
#include "replay.hpp"

#include <pybind11/stl.h>

#include <array>
#include <map>

#include "driver.hpp"
#include "failure.hpp"
#include "player.hpp"

namespace py = pybind11;

namespace te_compile::python {

std::vector<Ref> refs_of(const py::sequence& objects, bool with_gaps) {
  std::vector<Ref> refs;
  for (const py::handle object : objects) refs.push_back(with_gaps && object.is_none() ? Ref() : Ref::to(object));
  return refs;
}


namespace {

/// Places are (where, tensor, offset), of tensors from 0, with -1 for the stream.
std::vector<Spot> spots_of(const py::sequence& places, size_t tensors, size_t length) {
  std::vector<Spot> spots;
  for (const py::handle place : places) {
    const auto [where, tensor, offset] = py::cast<std::tuple<size_t, int64_t, int64_t>>(place);
    if (where >= length || tensor < -1 || tensor >= static_cast<int64_t>(tensors)) {
      throw py::value_error("a place leads to no argument, or comes from no tensor");
    }
    spots.push_back({where, tensor < 0 ? tensors : static_cast<size_t>(tensor), offset});
  }
  return spots;
}

Make make_of(const py::tuple& how) {
  const auto name = py::cast<std::string>(how[0]);
  Make make{};
  make.function = Ref::to(how[1]);
  if (name == "called") {
    make.how = Make::kCalled;
  } else if (name == "fresh") {
    make.how = Make::kFresh;
    make.arguments = refs_of(how[2], false);
    if (make.arguments.size() > 4) throw py::value_error("memory is made of at most 4 arguments");
  } else if (name == "stock" || name == "borrowed") {
    make.how = name == "stock" ? Make::kStock : Make::kBorrowed;
    make.table = Ref::to(py::cast<py::dict>(how[2]));
    make.kind = Ref::to(how[3]);
  } else {
    throw py::value_error("memory is 'called', 'fresh', 'stock' or 'borrowed', not '" + name + "'");
  }
  return make;
}

Call call_of(const py::tuple& step, size_t tensors) {
  Call call;
  call.function = Ref::to(step[0]);
  call.arguments = refs_of(step[1], false);
  call.spots = spots_of(step[2], tensors, call.arguments.size());
  return call;
}

/// (function, (x, y, z), threads, shared bytes, values of the parameters, places among them)
Launch launch_of(const py::tuple& description, size_t tensors) {
  Launch launch{};
  launch.function = reinterpret_cast<void*>(py::cast<uintptr_t>(description[0]));
  const auto grid = py::cast<std::array<unsigned, 3>>(description[1]);
  std::copy(grid.begin(), grid.end(), launch.grid);
  launch.threads = py::cast<unsigned>(description[2]);
  launch.shared_bytes = py::cast<unsigned>(description[3]);
  launch.values = py::cast<std::vector<uint64_t>>(description[4]);
  launch.spots = spots_of(description[5], tensors, launch.values.size());
  for (const unsigned length : {grid[0], grid[1], grid[2], launch.threads}) {
    if (length == 0) throw py::value_error("a launch of nothing");
  }
  if (launch.function == nullptr) throw py::value_error("a launch without a kernel");
  return launch;
}

/// Where a request keeps the address that is this argument of the function that makes it.
using Fields = std::map<size_t, size_t>;
const Fields kFieldsOfProduct = {
    {1, offsetof(te_gemm, a)},           {2, offsetof(te_gemm, b)},           {3, offsetof(te_gemm, d)},
    {4, offsetof(te_gemm, a_scale_inv)}, {5, offsetof(te_gemm, b_scale_inv)}, {6, offsetof(te_gemm, d_scale)},
    {7, offsetof(te_gemm, amax_d)},      {8, offsetof(te_gemm, bias)},        {9, offsetof(te_gemm, aux)},
    {10, offsetof(te_gemm, addend)},     {26, offsetof(te_gemm, workspace)},  {29, offsetof(te_gemm, stream)}};
const Fields kFieldsOfNorm = {
    {1, offsetof(te_norm, x)},      {6, offsetof(te_norm, weight)}, {9, offsetof(te_norm, bias)},
    {14, offsetof(te_norm, scale)}, {20, offsetof(te_norm, y)},     {21, offsetof(te_norm, q)},
    {22, offsetof(te_norm, qt)},    {23, offsetof(te_norm, amax)},  {24, offsetof(te_norm, scale_inv)},
    {25, offsetof(te_norm, mean)},  {26, offsetof(te_norm, rstd)},  {27, offsetof(te_norm, stream)}};

std::vector<Spot> fields_of(const py::tuple& description, size_t tensors, const Fields& fields) {
  const auto arguments = py::cast<py::sequence>(description[0]);
  std::vector<Spot> spots = spots_of(description[1], tensors, arguments.size());
  for (Spot& spot : spots) {
    const auto field = fields.find(spot.where);
    if (field == fields.end()) {
      throw py::value_error("there is no address at argument " + std::to_string(spot.where));
    }
    spot.where = field->second;
  }
  return spots;
}

/// (cublaslt_gemm's arguments with 0 where addresses go, places among them)
Product product_of(const py::tuple& description, size_t tensors) {
  Product product;
  product.gemm = gemm_of_arguments(description[0]);
  product.spots = fields_of(description, tensors, kFieldsOfProduct);
  return product;
}

/// The same of cuda_norm_quantize.
Norm norm_of(const py::tuple& description, size_t tensors) {
  return {norm_of_arguments(description[0]), fields_of(description, tensors, kFieldsOfNorm)};
}

Step step_of(const py::tuple& described, size_t tensors) {
  Step step;
  step.call = call_of(described, tensors);
  if (described.size() == 3) return step;
  const auto how = py::cast<std::string>(described[3]);
  if (how == "launch") {
    step.launch.emplace(launch_of(described[4], tensors));
  } else if (how == "product") {
    step.product.emplace(product_of(described[4], tensors));
  } else if (how == "norm") {
    step.norm.emplace(norm_of(described[4], tensors));
  } else {
    throw py::value_error("a step is a 'launch', a 'product' or a 'norm', not '" + how + "'");
  }
  return step;
}

py::object make_player(size_t given, const py::sequence& makes, const py::sequence& steps, const py::object& results,
                       const py::object& kept) {
  auto work = std::make_unique<Work>();
  work->given = given;
  for (const py::handle make : makes) work->makes.push_back(make_of(py::cast<py::tuple>(make)));
  const size_t tensors = work->tensors();
  for (const py::handle step : steps) work->steps.push_back(step_of(py::cast<py::tuple>(step), tensors));
  if (py::isinstance<py::int_>(results)) {
    work->results = {py::cast<size_t>(results)};
  } else {
    work->results = py::cast<std::vector<size_t>>(results);
    work->shape = py::isinstance<py::list>(results) ? Work::kList : Work::kTuple;
  }
  for (const size_t result : work->results) {
    if (result >= tensors) throw py::value_error("a result is no tensor of the call");
  }
  work->kept = Ref::to(kept);
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(new_player(std::move(work))));
}

std::string driver_missing() {
  try {
    driver::entry_points();
    return "";
  } catch (const Failure& failure) {
    return failure.what();
  }
}

void pretend_driver(uintptr_t launch, uintptr_t current_context, uintptr_t error_string) {
  static driver::Driver instead;
  if (launch == 0) return driver::pretend(nullptr);
  instead = {reinterpret_cast<driver::LaunchKernel>(launch),
             reinterpret_cast<driver::GetCurrentContext>(current_context),
             reinterpret_cast<driver::GetErrorString>(error_string)};
  driver::pretend(&instead);
}

}  // namespace

void add_replay(py::module_& module) {
  add_player_type();
  module.attr("Player") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(player_type));
  module.def("player", &make_player, "(given, makes, steps, results, kept) -> Player; see kernels/player.py");
  module.def("driver_missing", &driver_missing, "() -> why no kernel can be launched; empty if one can");
  module.def("pretend_driver", &pretend_driver, "(launch, current_context, error_string): for tests; 0 ends it");
  add_places(module);
  add_starts(module);
  add_unchanged(module);
}

}  // namespace te_compile::python
