// Package abort is the handle of one request that can be ended while it runs.
//
// One rule keeps callers safe: identify a request by its [Handle], never by a
// name that came with it. A request id can be forged, repeated or absent; a
// handle is the request.
//
// Whoever serves a request makes an [Owner] for it and hands the context on:
//
//	own, ctx := abort.New(parent)
//	defer own.Close()
//	serve(ctx)
//
// Everybody else finds the request's Handle in that context and may end it:
//
//	abort.FromContext(ctx).Abort(abort.Preempted)
//
// A request has one [Outcome]. An abort, the response's end, the client's
// departure and the server's return may all come at once; exactly one of them
// decides, and whoever asked learns whether it was theirs.
//
// Nothing here knows ext_proc: a reverse proxy can be an Owner too. Packages
// extproc and evictor meet in the handle and don't know each other.
package abort

import (
	"context"
	"time"
)

// A Reason says why a request was aborted. It is a label of low cardinality that
// ends up in response headers, access logs and metrics: letters a-z, digits and
// '-', at most 64 of them. Use [Reason.String] wherever it is rendered.
type Reason string

// The reasons this module's own packages give.
const (
	Preempted  Reason = "preempted"  // something that matters more needs the capacity
	Overloaded Reason = "overloaded" // there is too much work for the capacity
	Draining   Reason = "draining"   // its endpoint is going away
	Canceled   Reason = "canceled"   // somebody asked for it
)

const maxReason = 64

// String returns r as a label that is safe to render: upper case is lowered, any
// other byte outside [a-z0-9-] becomes '-', and what is longer than 64 bytes is
// cut. An empty Reason is "unspecified". It allocates only if r is no label yet.
func (r Reason) String() string {
	if r == "" {
		return "unspecified"
	}
	label := func(c byte) bool { return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-' }
	n := min(len(r), maxReason)
	i := 0
	for i < n && label(r[i]) {
		i++
	}
	if i == n {
		return string(r[:n])
	}
	b := []byte(r[:n])
	for ; i < n; i++ {
		if 'A' <= b[i] && b[i] <= 'Z' {
			b[i] += 'a' - 'A'
		} else if !label(b[i]) {
			b[i] = '-'
		}
	}
	return string(b)
}

// An Error is the cause of an aborted request's context, and what the errors of an
// aborted stream unwrap to. Find it with errors.AsType[*abort.Error].
type Error struct {
	Reason Reason
}

func (e *Error) Error() string { return "abort: request aborted: " + e.Reason.String() }

// An Outcome says how a request ended.
type Outcome uint8

const (
	Pending   Outcome = iota // it runs
	Completed                // its response arrived to the end
	Aborted                  // an Abort won
	Closed                   // anything else: the client left, the server returned or answered by itself
)

// String returns the outcome's name in lower case.
func (o Outcome) String() string {
	switch o {
	case Pending:
		return "pending"
	case Completed:
		return "completed"
	case Aborted:
		return "aborted"
	case Closed:
		return "closed"
	}
	return "invalid"
}

// A Phase says how far the response is. Later phases compare greater; a request
// never goes back to an earlier one.
type Phase int8

const (
	// Unknown is the phase of a request whose response nobody shows us: the client
	// may have all of it or nothing. As an argument it means any phase.
	Unknown   Phase = iota
	Waiting         // the upstream has not sent response headers
	Held            // response headers are here and not released to the client
	Streaming       // response headers were released
)

// String returns the phase's name in lower case.
func (p Phase) String() string {
	switch p {
	case Unknown:
		return "unknown"
	case Waiting:
		return "waiting"
	case Held:
		return "held"
	case Streaming:
		return "streaming"
	}
	return "invalid"
}

// Progress is how far a request has come. Chunks and Bytes count the response body
// as far as its Owner sees it: an ext_proc server whose response body mode is NONE
// sees none of it.
type Progress struct {
	Phase         Phase
	Start         time.Time // when New was called
	FirstChunk    time.Time // zero before the first chunk of the response body
	Chunks, Bytes int64
	Unseen        bool // nobody will count chunks: there may be any number of them
}

// A Request describes a request to policies and logs. It is advice, never identity.
type Request struct {
	ID        string // as the client sent it: may be forged, repeated or empty
	Key       string // the engine's own name for it, for Aborters that call the engine
	Priority  int    // higher matters more; take it from a source you trust
	Tokens    int64  // what it holds on Endpoint when dispatched, in the unit of your capacity (KV-cache tokens)
	Endpoint  string // where it runs
	Evictions int    // how often this work was evicted before
}

// An Aborter ends a request's work outside its stream: it tells the engine, drops a
// cache entry, writes an audit record. The evictor calls it before it ends the
// stream, and ends the stream itself when Abort returns nil; an error spares the
// request. Abort must return soon after ctx is done. It is called without locks
// and must be safe for concurrent use.
type Aborter interface {
	Abort(ctx context.Context, h *Handle, r Reason) error
}

// An AborterFunc is a function that is an Aborter.
type AborterFunc func(ctx context.Context, h *Handle, r Reason) error

// Abort calls f.
func (f AborterFunc) Abort(ctx context.Context, h *Handle, r Reason) error { return f(ctx, h, r) }
