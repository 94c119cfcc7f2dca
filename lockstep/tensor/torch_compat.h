// Differences between the supported versions of libtorch (2.11 to 2.15), one name each. The only
// version-dependent code: everything above uses these names.
//
//   libtorch      a node of the autograd graph is held by     the engine's node-creation hooks
//   2.11, 2.12    std::shared_ptr, deleted by deleteNode      -
//   2.13          c10::intrusive_ptr                          -
//   from 2.14     c10::intrusive_ptr                          get_node_creation_hooks
//
// Detected from libtorch's types, not from its version number: a source build need not have a release's
// number. Thread safety and ownership are those of libtorch's own pointers.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
#include <torch/csrc/autograd/node_creation_hook.h>
#endif

#include <memory>
#include <vector>

namespace lockstep::compat {

namespace internal {

template <class Pointer>
struct NodePointers;

template <class Node>
struct NodePointers<std::shared_ptr<Node>> {
  template <class T>
  using Owner = std::shared_ptr<T>;
  using Weak = std::weak_ptr<Node>;
  // deleteNode destroys a graph without recursion. Found by argument-dependent lookup at instantiation: 2.13
  // has none.
  template <class T>
  static Owner<T> own(T* fresh) {
    return {fresh, [](T* node) { deleteNode(node); }};
  }
};

template <class Node>
struct NodePointers<c10::intrusive_ptr<Node>> {
  template <class T>
  using Owner = c10::intrusive_ptr<T>;
  using Weak = c10::weak_intrusive_ptr<Node>;
  template <class T>
  static Owner<T> own(T* fresh) {
    return Owner<T>::unsafe_steal_from_new(fresh);
  }
};

using Pointers = NodePointers<decltype(torch::autograd::Edge::function)>;

}  // namespace internal

// Shared ownership of a node of class T. Converts to NodeOwner<Node>, the type that libtorch's functions
// take.
template <class T>
using NodeOwner = internal::Pointers::Owner<T>;
using NodePtr = NodeOwner<torch::autograd::Node>;
// Made from a NodePtr. expired(), lock().
using WeakNodePtr = internal::Pointers::Weak;

// Takes ownership of a node just created by `new`.
template <class T>
NodeOwner<T> own_node(T* fresh) {
  return internal::Pointers::own(fresh);
}

// Base of an engine that wraps another one. Forwards the virtual functions that not every version has; the
// derived class forwards the others. Engine is torch::autograd::Engine, a parameter so that few files include
// all of it.
template <class Engine>
class EngineInFront : public Engine {
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
 public:
  std::vector<std::unique_ptr<torch::autograd::NodeCreationHook>> get_node_creation_hooks() override {
    return behind().get_node_creation_hooks();
  }
#endif

 protected:
  virtual Engine& behind() const = 0;
};

}  // namespace lockstep::compat
