// The core's errors as Python's. Needs Python.h, so it belongs to the extensions and not to the core.
// Threads: with the GIL held.
#pragma once

#include <Python.h>

#include <cstring>
#include <exception>
#include <new>
#include <optional>

#include "p3/error.h"

namespace p3::binding {

inline const char* name_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kUsage: return "usage";
    case ErrorKind::kDisagreement: return "disagreement";
    case ErrorKind::kPeerLost: return "peer_lost";
    case ErrorKind::kPeerSilent: return "peer_silent";
    case ErrorKind::kProtocol: return "protocol";
    case ErrorKind::kRemote: return "remote";
    case ErrorKind::kStopped: return "stopped";
  }
  return "unknown";
}

// A new p3._core.P3Error; null, with Python's error set, if there is none to be had.
inline PyObject* new_p3_error(const Error& error) {
  PyObject* core = PyImport_ImportModule("p3._core");
  if (core == nullptr) return nullptr;
  PyObject* type = PyObject_GetAttrString(core, "P3Error");
  Py_DECREF(core);
  if (type == nullptr) return nullptr;
  // Texts can come from other nodes: whatever their bytes, they become a string.
  PyObject* text = PyUnicode_DecodeUTF8(error.what(), static_cast<Py_ssize_t>(std::strlen(error.what())), "replace");
  PyObject* made = text == nullptr ? nullptr : PyObject_CallFunction(type, "Os", text, name_of(error.kind()));
  Py_XDECREF(text);
  Py_DECREF(type);
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
