// The core's errors as Python's. Needs Python.h, so it belongs to the extensions and not to the core.
// Threads: with the GIL held.
#pragma once

#include <Python.h>

#include <exception>
#include <new>
#include <optional>
#include <string>

#include "p3/error.h"

namespace p3::binding {

// In the order of ErrorKind.
constexpr const char* kKinds[] = {"usage", "disagreement", "peer_lost", "peer_silent", "protocol", "remote", "stopped"};

inline PyObject* new_none() {
  Py_INCREF(Py_None);
  return Py_None;
}

// Texts can come from other nodes: whatever their bytes, they become a string. None for an empty one.
inline PyObject* text_or_none(const std::string& text) {
  if (text.empty()) return new_none();
  return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
}

// A new p3._core.P3Error; null, with Python's error set, if there is none to be had.
inline PyObject* new_p3_error(const Error& error) {
  PyObject* core = PyImport_ImportModule("p3._core");
  if (core == nullptr) return nullptr;
  PyObject* type = PyObject_GetAttrString(core, "P3Error");
  Py_DECREF(core);
  if (type == nullptr) return nullptr;
  const Subject& subject = error.subject();
  PyObject* const text = text_or_none(error.what());
  PyObject* const peer = text_or_none(subject.peer);
  PyObject* const key = text_or_none(subject.key);
  PyObject* const round = subject.round ? PyLong_FromUnsignedLongLong(*subject.round) : new_none();
  PyObject* made = nullptr;
  if (text != nullptr && peer != nullptr && key != nullptr && round != nullptr)
    made = PyObject_CallFunction(type, "OsOOO", text, kKinds[static_cast<size_t>(error.kind())], peer, key, round);
  for (PyObject* object : {text, peer, key, round, type}) Py_XDECREF(object);
  return made;
}

inline PyObject* error_or_none(const std::optional<Error>& error) {
  if (error) return new_p3_error(*error);
  Py_RETURN_NONE;
}

// In a catch block: sets Python's error. The one place where exceptions of the core become Python's.
inline void raise_as_python() {
  try {
    throw;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kUsage) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } else if (PyObject* made = new_p3_error(error)) {
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made)), made);
      Py_DECREF(made);
    }
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

}  // namespace p3::binding
