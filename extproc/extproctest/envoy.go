// Package extproctest is to ext_proc servers what net/http/httptest is to HTTP handlers: a fake of Envoy's ext_proc filter
// that runs in process, needs no network, and works inside a testing/synctest bubble.
//
// The rule for a server under test is the protocol itself: one reply per message, in order, nothing behind an
// ImmediateResponse. What breaks it is treated as Envoy treats it, and told to [Envoy.Errorf]. An HTTP client whose
// requests go through a server:
//
//	envoy := &extproctest.Envoy{
//		Server:   mine,
//		Upstream: extproctest.Handler(model),
//		Config: &filterpb.ExternalProcessor{ProcessingMode: &filterpb.ProcessingMode{
//			ResponseBodyMode: filterpb.ProcessingMode_STREAMED,
//		}},
//		Errorf: t.Errorf,
//	}
//	client := &http.Client{Transport: envoy}
//
// [Stream] is the layer below: one ext_proc stream, both ends, for tests that send the messages themselves.
//
// What [Envoy] does was measured on Envoy 1.36 to 1.40; where these differ it does as 1.37 and later. It is one filter, one
// route and one cluster. Not modelled are the codecs (HTTP/2 frames and error codes, HTTP/1's delayed close), retries, route
// and idle timeouts, other filters, the gRPC form of local replies (grpc_status), StreamedImmediateResponse, draining,
// attributes, mutation rules, allowed override modes, and body mode GRPC; an [Envoy.Config] that asks for one of these
// panics.
package extproctest

import (
	"fmt"
	"io"
	"net/http"
	"time"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/structpb"
)

// ErrReset is what reading a response's body returns, behind the bytes that had been forwarded, when Envoy has reset it.
// It wraps [io.ErrUnexpectedEOF], which net/http's client returns in that case.
var ErrReset = fmt.Errorf("extproctest: the proxy reset the response: %w", io.ErrUnexpectedEOF)

// An Envoy is an HTTP transport that runs each request through an ext_proc server, on a stream of its own, and sends it to
// an upstream, as an Envoy with one ext_proc filter does. Its fields must not change after the first request; it may then
// be used concurrently.
//
// Like every http.RoundTripper it needs its responses' bodies read to the end or closed, or the request's context ended:
// until then the request is not over. It is over when the client has its response and Process has returned, and leaves no
// goroutine.
type Envoy struct {
	// Server is the ext_proc server. Its panics are caught and taken for a lost connection.
	Server extprocpb.ExternalProcessorServer

	// Upstream gets the requests; nil is http.DefaultTransport. If it fails before there are response headers, the client
	// gets Envoy's 503.
	Upstream http.RoundTripper

	// Config is the filter's configuration, the message that goes into a real Envoy's listener. nil and absent fields have
	// Envoy's defaults: both headers are sent, no body, no trailers, and a message_timeout of 200 ms. Modelled are
	// processing_mode, message_timeout, max_message_timeout, failure_mode_allow, disable_immediate_response,
	// allow_mode_override, observability_mode, deferred_close_timeout, metadata_options.receiving_namespaces.untyped,
	// status_on_error and allow_content_length_header. What only concerns the connection to the server, statistics or
	// routes is ignored.
	Config *filterpb.ExternalProcessor

	// BufferLimit is the listener's per_connection_buffer_limit_bytes: how many bytes of a message BUFFERED takes, and how
	// many may be on their way in the other modes before Envoy stops reading. 0 is 1 MiB, Envoy's default.
	BufferLimit int

	// Quirks makes it differ from Envoy in what follows an ImmediateResponse.
	Quirks Quirks

	// AccessLog, if not nil, is called once per request when that is over, on the request's own goroutine.
	AccessLog func(Entry)

	// Errorf, if not nil, is told what the server does against the protocol, or without the effect it seems to hope for:
	// spurious messages, a message behind an ImmediateResponse, headers that Envoy drops, chunks that get lost because
	// Process returned, panics. testing.T's Errorf fits.
	Errorf func(format string, args ...any)
}

// Quirks are what other proxies do, and Envoy in unlucky moments. The zero value is Envoy.
type Quirks struct {
	// HangUp is how the stream ends after an ImmediateResponse.
	HangUp HangUp

	// HangUpDelay is the time from an ImmediateResponse to the end of the stream, and from a half-close to the reset that
	// follows it. 0 is 1 ms: Envoy takes 0.3 to 1.2.
	HangUpDelay time.Duration

	// KeepSending lets the upstream run on after an ImmediateResponse, and sends its headers and chunks to the server, until
	// the stream ends. The client is answered all the same.
	KeepSending bool

	// StopReading, if positive, is the number of the server's messages that are read. After that Send blocks once Window
	// messages are unread.
	StopReading int

	// Window is how many messages the server can have sent unread; 0 is 64. grpc counts 64 KiB.
	Window int

	// Pause is the [Stream.Pause] of each stream.
	Pause func()
}

// HangUp is how a stream ends.
type HangUp int

const (
	// Reset is Envoy's way: Recv returns Canceled and the context ends.
	Reset HangUp = iota
	// HalfClose lets Recv return io.EOF while the context lives, until the client has all of its response.
	HalfClose
	// HalfCloseThenReset is a HalfClose and a Reset soon after: Envoy's way with the runtime guard
	// ext_proc_graceful_grpc_close, and in any case where the request ends before the stream.
	HalfCloseThenReset
	// Never neither closes the stream nor reads from it until Process returns.
	Never
	// Ignore takes no notice of an ImmediateResponse: the client is not answered, and the stream and the request go on.
	Ignore
)

// An Entry is a request's line in the access log.
type Entry struct {
	RequestID string // x-request-id
	Method    string
	Path      string
	Code      int    // %RESPONSE_CODE%: that of the upstream's response if the client left before it had one, 0 without
	Details   string // %RESPONSE_CODE_DETAILS%: via_upstream, or why not
	Bytes     int64  // %BYTES_SENT%: the bytes of the response's body that the client has taken
	Complete  bool   // the client has a whole response; else it was reset, or the client left

	Err      error                       // what Process returned
	Panic    any                         // what Process panicked with
	Metadata map[string]*structpb.Struct // %DYNAMIC_METADATA% from the server, by namespace
}

// RoundTrip implements http.RoundTripper. It returns an error only if the request's context ends before there is a
// response, or if Envoy resets the request then ([ErrReset]).
func (e *Envoy) RoundTrip(req *http.Request) (*http.Response, error) {
	x := newExchange(e, req)
	go x.run() // ends when the request is over
	h := <-x.head
	return h.res, h.err
}

// modelled are the fields of the configuration that may be set.
var modelled = map[protoreflect.Name]bool{
	"processing_mode": true, "message_timeout": true, "max_message_timeout": true, "failure_mode_allow": true,
	"disable_immediate_response": true, "allow_mode_override": true, "observability_mode": true,
	"deferred_close_timeout": true, "metadata_options": true, "status_on_error": true, "allow_content_length_header": true,
	// without meaning here
	"grpc_service": true, "stat_prefix": true, "filter_metadata": true, "emit_client_span": true,
	"disable_clear_route_cache": true, "route_cache_action": true,
}

// checked returns the configuration, or panics if Envoy or this package could not run with it.
func (e *Envoy) checked() *filterpb.ExternalProcessor {
	if e.Config == nil {
		return new(filterpb.ExternalProcessor)
	}
	e.Config.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
		if !modelled[f.Name()] {
			panic("extproctest: " + string(f.Name()) + " is not modelled")
		}
		return true
	})
	pm := e.Config.GetProcessingMode()
	for _, m := range []mode{requestMode(pm, nil), responseMode(pm, nil)} {
		switch {
		case m.body == filterpb.ProcessingMode_GRPC:
			panic("extproctest: body mode GRPC is not modelled")
		case m.body == filterpb.ProcessingMode_FULL_DUPLEX_STREAMED && !m.trailers:
			panic("extproctest: FULL_DUPLEX_STREAMED needs the trailer mode of its side to be SEND")
		}
	}
	return e.Config
}
