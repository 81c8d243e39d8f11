// Package extevict is the map of a library that ends requests while they run, for
// inference gateways built on Envoy. It holds no code; import what you need:
//
//   - [github.com/extevict/extevict/extproc] makes the requests of an existing ext_proc
//     server abortable: Wrap it, and nothing else changes.
//   - [github.com/extevict/extevict/evictor] knows the requests in flight and ends those
//     that matter least.
//   - [github.com/extevict/extevict/abort] is the handle of one request, in which the two
//     meet: its one outcome, the Registry that finds it by id, the Aborter that you can
//     implement.
//   - [github.com/extevict/extevict/flowcontrol] decides how many end, when, and for whom:
//     admission to endpoints of finite capacity, with preemption.
//   - [github.com/extevict/extevict/extproc/extproctest] is a strict fake of Envoy for your
//     tests.
//
// A request's life: Envoy opens an ext_proc stream, and Wrap mints a handle and a
// context that carries it. The server picks an endpoint and tells the evictor what
// the request holds there; from then on it may be chosen. Whoever ends it calls
// Abort on the handle. Exactly one of abort, completion and departure wins; if it is
// the abort, one ImmediateResponse goes out on the stream, whatever phase the request
// is in. Envoy answers the client, or resets it if response headers have been
// released, resets the upstream connection, and the engine frees what the request held.
//
// The README says how Envoy must be configured and what clients see.
package extevict
