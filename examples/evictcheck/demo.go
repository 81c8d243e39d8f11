package main

import (
	"context"
	"errors"
	"io"

	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"time"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/examples/admin"
	"github.com/extevict/extevict/examples/internal/passthrough"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/extproc/extproctest"
	"github.com/extevict/extevict/internal/engine"
	"github.com/extevict/extevict/internal/envoy"
)

// A setup is a deployment to try the check on: an engine, perhaps a hop, and a gateway
// with its ext_proc filter.
type setup struct {
	name, about string
	engine      engine.AbortMode
	swallow     bool // there is a hop that swallows resets
	filter      envoy.ExtProc
}

var (
	evictable   = envoy.ProcessingMode{ResponseBody: envoy.FullDuplexStreamed, ResponseTrailers: envoy.Send}
	trailers    = envoy.ProcessingMode{ResponseTrailers: envoy.Send}
	requestOnly = envoy.ProcessingMode{RequestHeaders: envoy.Send, ResponseHeaders: envoy.Skip}
)

var setups = []setup{
	{name: "normal", about: "all is as it should be", filter: envoy.ExtProc{Mode: evictable}},
	{name: "ignore", about: "the engine ignores that connections close", engine: engine.AbortNever, filter: envoy.ExtProc{Mode: evictable}},
	{name: "leak", about: "the engine loses what an aborted request held", engine: engine.AbortLeak, filter: envoy.ExtProc{Mode: evictable}},
	{name: "swallow", about: "a hop between gateway and engine swallows resets", swallow: true, filter: envoy.ExtProc{Mode: evictable}},
	{name: "disabled", about: "disable_immediate_response and failure_mode_allow are on", filter: envoy.ExtProc{Mode: trailers, DisableImmediateResponse: true, FailureModeAllow: true}},
	{name: "disabled-closed", about: "disable_immediate_response is on, failure_mode_allow is not", filter: envoy.ExtProc{Mode: evictable, DisableImmediateResponse: true}},
	{name: "request-only", about: "the filter's response side is off, response_trailer_mode too", filter: envoy.ExtProc{Mode: requestOnly}},
	{name: "unstreamed", about: "the engine ignores that connections close if the answer is not streamed", engine: engine.AbortStreaming, filter: envoy.ExtProc{Mode: evictable}},
}

// demoSlots is how many requests the demo's engine runs at once.
const demoSlots = 4

// A demo is a setup that runs.
type demo struct {
	gateway, metrics, engine, admin string // URLs
	name                            string // of the gateway
	closers                         []func() error
}

// startDemo starts a setup behind the given kind of gateway: "auto", "envoy" or
// "in-process".
func startDemo(ctx context.Context, s setup, gateway string) (d *demo, err error) {
	d = new(demo)
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
			d = nil
		}
	}()
	e := engine.NewServer(engine.Config{
		Blocks: 1000, MaxSeqs: demoSlots, AbortMode: s.engine,
		Cost: engine.Cost{Step: 4 * time.Millisecond, Prefill: 10 * time.Microsecond},
	})
	d.onClose(func() error { e.Close(); return nil })
	if d.engine, err = d.serve(&http.Server{Handler: e}); err != nil {
		return d, err
	}
	d.metrics = d.engine + "/metrics"
	upstream := d.engine
	if s.swallow {
		if upstream, err = d.startHop(upstream); err != nil {
			return d, err
		}
	}

	var registry abort.Registry
	ev := evictor.New()
	endpoint := d.engine[len("http://"):]
	describe := func(_ context.Context, req *extprocpb.ProcessingRequest) (abort.Request, bool) {
		return abort.Request{Priority: -1, Endpoint: endpoint}, true
	}
	picker := extproc.Wrap(new(picker), extproc.WithRegistry(&registry), extproc.WithTracker(ev, describe))
	if d.admin, err = d.serve(admin.NewServer(admin.Handler(admin.Config{Registry: &registry, Evictor: ev}))); err != nil {
		return d, err
	}

	bin, missing := envoy.Find()
	switch {
	case gateway != "in-process" && missing == nil:
		err = d.startEnvoy(ctx, bin, s.filter, upstream, picker)
	case gateway == "envoy":
		err = missing
	default:
		d.name = "in process, as Envoy's ext_proc filter does"
		d.gateway, err = d.serve(newInProcess(s.filter, upstream, picker))
	}
	return d, err
}

func (d *demo) onClose(f func() error) { d.closers = append(d.closers, f) }

// close ends the demo, last things first.
func (d *demo) close() (err error) {
	for i := len(d.closers) - 1; i >= 0; i-- {
		err = errors.Join(err, d.closers[i]())
	}
	return err
}

// serve starts a server on loopback and returns its URL.
func (d *demo) serve(s *http.Server) (string, error) {
	l, err := admin.Listen("127.0.0.1:0", false)
	if err != nil {
		return "", err
	}
	s.ErrorLog = log.New(io.Discard, "", 0)
	go s.Serve(l) // ends with s.Close
	d.onClose(s.Close)
	return "http://" + l.Addr().String(), nil
}

// startHop starts a proxy that goes on reading when its client has left.
func (d *demo) startHop(upstream string) (string, error) {
	ctx, cancel := context.WithCancel(context.Background())
	d.onClose(func() error { cancel(); return nil })
	transport := new(http.Transport)
	return d.serve(&http.Server{Handler: fullDuplex(func(w http.ResponseWriter, r *http.Request) {
		out := r.Clone(ctx) // not the client's context
		out.RequestURI = ""
		out.URL.Scheme, out.URL.Host = "http", upstream[len("http://"):]
		resp, err := transport.RoundTrip(out)
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		defer resp.Body.Close()
		w.Header().Set("Content-Type", resp.Header.Get("Content-Type"))
		w.WriteHeader(resp.StatusCode)
		flush := http.NewResponseController(w)
		chunk := make([]byte, 4096)
		for err == nil {
			var n int
			n, err = resp.Body.Read(chunk)
			w.Write(chunk[:n]) // whether it arrives or not
			flush.Flush()
		}
	})})
}

// startEnvoy starts a real Envoy, and the picker as the grpc server that it calls.
func (d *demo) startEnvoy(ctx context.Context, bin string, filter envoy.ExtProc, upstream string, picker extprocpb.ExternalProcessorServer) error {
	version, err := envoy.Version(bin)
	if err != nil {
		return err
	}
	d.name = "Envoy " + version
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	extprocpb.RegisterExternalProcessorServer(s, picker)
	go s.Serve(l) // ends with s.Stop
	d.onClose(func() error { s.Stop(); return nil })
	filter.Address = l.Addr().String()
	delay := 100 * time.Millisecond
	e, err := envoy.Start(ctx, bin, envoy.Config{
		ExtProc: []envoy.ExtProc{filter}, DelayedClose: &delay,
		Upstream: envoy.Upstream{Endpoints: []string{upstream[len("http://"):]}},
	})
	if err != nil {
		return err
	}
	d.onClose(e.Close)
	d.gateway = e.URL()
	return nil
}

// newInProcess returns a reverse proxy that does with each request what Envoy's ext_proc
// filter does.
func newInProcess(filter envoy.ExtProc, upstream string, picker extprocpb.ExternalProcessorServer) *http.Server {
	header := func(m envoy.HeaderMode) filterpb.ProcessingMode_HeaderSendMode {
		return filterpb.ProcessingMode_HeaderSendMode(filterpb.ProcessingMode_HeaderSendMode_value[string(m)])
	}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: upstream[len("http://"):]})
		},
		Transport: &extproctest.Envoy{
			Server: picker,
			Config: &filterpb.ExternalProcessor{
				ProcessingMode: &filterpb.ProcessingMode{
					RequestHeaderMode:   header(filter.Mode.RequestHeaders),
					ResponseHeaderMode:  header(filter.Mode.ResponseHeaders),
					ResponseBodyMode:    filterpb.ProcessingMode_BodySendMode(filterpb.ProcessingMode_BodySendMode_value[string(filter.Mode.ResponseBody)]),
					ResponseTrailerMode: header(filter.Mode.ResponseTrailers),
				},
				MessageTimeout:           durationpb.New(10 * time.Second),
				DisableImmediateResponse: filter.DisableImmediateResponse,
				FailureModeAllow:         filter.FailureModeAllow,
			},
		},
		FlushInterval: -1, // at once
		ErrorLog:      log.New(io.Discard, "", 0),
	}
	return &http.Server{Handler: fullDuplex(proxy.ServeHTTP)}
}

// fullDuplex returns h as a proxy needs it: net/http's server otherwise closes an
// HTTP/1.1 request's body when its response begins, and a transport that has not yet
// seen the body's end takes that for an error and drops the response.
func fullDuplex(h http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex() // fails where it is not needed
		h(w, r)
	})
}

// A picker lets everything pass, in FULL_DUPLEX_STREAMED too.
type picker struct {
	extprocpb.UnimplementedExternalProcessorServer
}

// Process implements extprocpb.ExternalProcessorServer.
func (*picker) Process(st extprocpb.ExternalProcessor_ProcessServer) error {
	for {
		req, err := st.Recv()
		if err != nil {
			return err
		}
		reply := passthrough.Reply(req)
		if b := req.GetResponseBody(); b != nil {
			reply.GetResponseBody().Response = &extprocpb.CommonResponse{BodyMutation: &extprocpb.BodyMutation{
				Mutation: &extprocpb.BodyMutation_StreamedResponse{StreamedResponse: &extprocpb.StreamedBodyResponse{
					Body: b.GetBody(), EndOfStream: b.GetEndOfStream(),
				}},
			}}
		}
		if err := st.Send(reply); err != nil {
			return err
		}
	}
}
