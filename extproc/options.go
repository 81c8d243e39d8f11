package extproc

import (
	"context"
	"time"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/extevict/extevict/abort"
)

// An Option configures [Wrap], [Handler] or [StreamInterceptor]. One that is
// misused panics when it is made, with its name in the message.
type Option func(*options)

type options struct {
	tracker   Tracker
	classify  func(context.Context, *extprocpb.ProcessingRequest) (abort.Request, bool)
	registry  *abort.Registry
	response  func(*abort.Error, []abort.Request) *extprocpb.ImmediateResponse
	event     ErrorEvent
	keepalive bool
	observe   func(Event)
}

func newOptions(opts []Option) *options {
	o := &options{}
	WithErrorEvent(ErrorEvent{})(o)
	for _, f := range opts {
		if f == nil {
			panic("extproc: nil Option")
		}
		f(o)
	}
	return o
}

// A Tracker is told which request a stream carries. An *evictor.Evictor is one.
type Tracker interface {
	TrackRequests(context.Context, ...abort.Request)
}

// WithTracker has t track each stream's request when its headers arrive: for
// servers whose own code gets no context. describe says what the request is and
// holds, from the headers and from what the stream's context carries; it runs on the
// goroutine that calls Recv. It returns false for a stream that is not to be
// tracked, which is then nobody's victim: one whose filter cannot be evicted (see
// [Obstacle]), and the second of two for one HTTP request, which would count twice:
// that of another ext_proc filter in the chain, or of one in the upstream's cluster,
// which opens one for each try. No message tells which filter a stream is of. The
// operator can, in grpc_service.initial_metadata of the filter, where a client cannot
// write: metadata.ValueFromIncomingContext of grpc finds it in the context.
// Nothing is read from a header by default: a client that chose its own priority
// could escape eviction.
func WithTracker(t Tracker, describe func(context.Context, *extprocpb.ProcessingRequest) (abort.Request, bool)) Option {
	if t == nil {
		panic("extproc: WithTracker: nil Tracker")
	}
	if describe == nil {
		panic("extproc: WithTracker: nil function")
	}
	return func(o *options) { o.tracker, o.classify = t, describe }
}

// WithRegistry has each request added to r under its x-request-id when its headers
// arrive.
func WithRegistry(r *abort.Registry) Option {
	if r == nil {
		panic("extproc: WithRegistry: nil Registry")
	}
	return func(o *options) { o.registry = r }
}

// WithResponse has f make the answer to an abort, instead of [Response]. f gets the
// abort's error and what the request's Handle describes. It runs on a goroutine of
// its own while the client waits, and must return soon.
//
// What f returns is checked against what Envoy was seen to make of it: a status
// outside 400..599, a header whose name or value is invalid (Envoy drops all later
// ones), that Envoy refuses (host, x-envoy-*, names that begin with ':', content-length) or
// that has a value but no raw_value, a grpc_status 0 for a gRPC request, and a message
// that does not marshal. If the check fails, or f panics or returns nil, the answer is
// Response's and the [Event] has the error. Empty details are filled in, and so is
// an absent grpc_status for a gRPC request. f may return the same message each time.
func WithResponse(f func(*abort.Error, []abort.Request) *extprocpb.ImmediateResponse) Option {
	if f == nil {
		panic("extproc: WithResponse: nil function")
	}
	return func(o *options) { o.response = f }
}

// An ErrorEvent is what the client of an SSE stream gets before its connection is
// reset, so that it can tell an eviction from a broken connection. It is sent if the
// content type that the client got is text/event-stream without content-length or
// content-encoding, the request is not gRPC, what was forwarded so far ends with an
// empty line, and Envoy lets the server speak:
//
//   - in FULL_DUPLEX_STREAMED unasked, once a part of the body has passed;
//   - in STREAMED in place of the oldest chunk that the server has not replied to,
//     except the last.
//
// In doubt there is no event. A filter with disable_immediate_response that fails open
// takes the event and drops the answer behind it: in STREAMED the response then runs on
// without the chunk that the event replaced.
type ErrorEvent struct {
	// Event returns the event's bytes, with the empty line that ends it, or nothing
	// for no event. It runs where WithResponse's function does; if it panics there is
	// no event. Nil means an OpenAI-style error object, which the OpenAI clients raise
	// as an API error with its message, type and code.
	Event func(*abort.Error, []abort.Request) []byte

	// Wait is how long the answer to an abort waits in STREAMED for the next chunk if
	// the server owes no reply: a server that answers at once does so at most times.
	// The price is that the upstream is reset that much later, a token's time mostly.
	Wait time.Duration

	// CleanEnd, in FULL_DUPLEX_STREAMED, has the event end the client's response
	// normally instead of a reset; the upstream is reset all the same. The price is
	// that Envoy's access log shows a normal 200; what happened is in the dynamic
	// metadata (%DYNAMIC_METADATA(extevict:evicted)%), if the filter's
	// metadata_options.receiving_namespaces.untyped has [MetadataNamespace].
	CleanEnd bool
}

// MetadataNamespace is where a CleanEnd leaves the reason of the eviction, as "evicted".
const MetadataNamespace = "extevict"

// WithErrorEvent sets the error event. Without the option it is that of the zero
// ErrorEvent; to send none, have Event return nothing. It panics if Wait is negative.
func WithErrorEvent(e ErrorEvent) Option {
	if e.Wait < 0 {
		panic("extproc: WithErrorEvent: negative Wait")
	}
	if e.Event == nil {
		e.Event = errorEvent
	}
	return func(o *options) { o.event = e }
}

// WithKeepalive keeps the streams of a request-only server evictable in every phase
// without a change to Envoy's processing mode; the filter needs allow_mode_override:
// true. Since 1.37 Envoy ends a stream once no later phase is processed. So the reply to
// the request's headers is sent with a mode_override that asks for response trailers,
// which few responses have, and which Wrap answers itself: the server sees no message
// that it would not have seen.
//
// It does nothing if the response's body mode is not NONE, since every other mode keeps
// the stream open; if the request's is FULL_DUPLEX_STREAMED, for which Envoy has no
// overrides; and if the server sets an override of its own. The line
// response_trailer_mode: SEND in Envoy's configuration does the same without it.
func WithKeepalive() Option { return func(o *options) { o.keepalive = true } }

// WithObserver has f called with one [Event] for each request, when it has settled
// and the stream is over. f runs without locks, mostly on the stream's own goroutine,
// which it delays; after an abort it may run on another and outlast Process. It must be
// safe for concurrent use. If it panics, nobody notices.
func WithObserver(f func(Event)) Option {
	if f == nil {
		panic("extproc: WithObserver: nil function")
	}
	return func(o *options) { o.observe = f }
}

// An Event tells how a request ended.
type Event struct {
	Handle   *abort.Handle
	Outcome  abort.Outcome
	Phase    abort.Phase // when the outcome was decided
	Answer   Answer      // what the proxy was sent because of an abort
	Effect   Effect      // what is known to have come of it
	Obstacle Obstacle    // why the request could not be evicted, or no longer
	Err      error       // why the answer could not be sent, or why a custom one was not used

	Settled  time.Time // when the outcome was decided
	Answered time.Time // when the answer had been handed to grpc; zero if it was not
	Ended    time.Time // when the proxy had hung up, or the server returned
}

// An Answer is what the proxy was sent because of an abort, by what Envoy is
// expected to make of it.
type Answer uint8

const (
	AnswerNone    Answer = iota // nothing: no abort, or the proxy was gone
	AnswerStatus                // an ImmediateResponse; the client gets its status, headers and body
	AnswerReset                 // an ImmediateResponse; response headers are out, so the client is reset
	AnswerEvent                 // an error event, then an ImmediateResponse: the client is reset behind the event
	AnswerEnd                   // an error event that ends the response (CleanEnd)
	AnswerUnknown               // an ImmediateResponse in an unknown phase: status or reset
)

// String returns the answer's name in lower case.
func (a Answer) String() string {
	switch a {
	case AnswerNone:
		return "none"
	case AnswerStatus:
		return "status"
	case AnswerReset:
		return "reset"
	case AnswerEvent:
		return "event"
	case AnswerEnd:
		return "end"
	case AnswerUnknown:
		return "unknown"
	}
	return "invalid"
}

// An Effect is what is known to have come of an abort's answer. None of them says that
// the engine has freed anything.
//
// Where Envoy ends the stream with code Canceled for a reason of its own, an answer that
// came too late for it looks like EffectEnded and is not. That is so with response body
// mode NONE if the whole response reached Envoy before the reply to its headers (seen on
// Envoy 1.40: 59 of 60 in a directed test, 3 to 6 of 200 random evictions); behind a filter
// with disable_immediate_response (see [Obstacle]); just after Envoy's own 504; and, since
// 1.37, if another ext_proc filter is shown the answer and does not reply: the upstream is
// reset, but the client waits for that filter's message_timeout and gets a 504.
type Effect uint8

const (
	EffectNone        Effect = iota // there was no abort
	EffectEnded                     // the proxy has hung up because of it: in Envoy's case after resetting the upstream
	EffectUnconfirmed               // it was not sent, something else ended the stream first, or the proxy has not hung up within a second
)

// String returns the effect's name in lower case.
func (e Effect) String() string {
	switch e {
	case EffectNone:
		return "none"
	case EffectEnded:
		return "ended"
	case EffectUnconfirmed:
		return "unconfirmed"
	}
	return "invalid"
}

// An Obstacle is why a request could not be evicted, or no longer, as far as its stream
// shows it.
//
// A filter with disable_immediate_response is none that shows: in every phase it takes
// an answer as Envoy takes any, and hangs up as fast and with the same code (seen on Envoy
// 1.36 and 1.40), so that the Event says EffectEnded. The request gets a 500 or, behind
// response headers, a reset, and is gone; with failure_mode_allow it runs on, except in
// FULL_DUPLEX_STREAMED. Envoy's access log tells: response code details
// unhandled_immediate_response_due_to_config_disabled_it, or via_upstream where the
// request ran on. disable_immediate_response: false mends it.
//
// A filter in the upstream's cluster is no obstacle: it can be evicted in every phase
// like one in front of the router, also where the route retries.
type Obstacle uint8

const (
	ObstacleNone          Obstacle = iota
	ObstacleObservability          // the filter has observability_mode: Envoy does not listen
	ObstacleEarlyEnd               // Envoy ended the stream while the request ran on, since no later phase is processed
)

// String says what the obstacle is and which line of Envoy's configuration mends it; it is
// empty for none.
func (o Obstacle) String() string {
	switch o {
	case ObstacleNone:
		return ""
	case ObstacleObservability:
		return "not evictable: set observability_mode: false in the ext_proc filter"
	case ObstacleEarlyEnd:
		return "not evictable after its stream's end: set response_trailer_mode: SEND in the ext_proc filter's processing_mode, or allow_mode_override: true with WithKeepalive"
	}
	return "invalid"
}
