package main

import (
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"time"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/extevict/extevict/extproc/extproctest"
	"github.com/extevict/extevict/internal/envoy"
)

// A mode is how much of a response the gateway shows the picker. In each of them a
// request can be evicted until its response has ended.
type mode struct{ name, body string }

var modes = []mode{
	{"full-duplex", "FULL_DUPLEX_STREAMED"}, // the picker can add the error event
	{"streamed", "STREAMED"},
	{"trailers", "NONE"}, // no message at all while the response streams: the Pool guesses at its progress
}

// messageTimeout is the filter's message_timeout. A request that waits for room holds the
// reply to its headers, so this must be more than anybody is to wait; Envoy's default of
// 200 ms would answer them all with a 504. Only in a direction whose body mode is
// FULL_DUPLEX_STREAMED there is no such timer, and requests have none here.
const messageTimeout = 2 * time.Minute

// A gateway is a running proxy in front of the engine.
type gateway struct {
	name  string
	url   string
	close func() error
}

// startGateway starts the proxy of the given kind, "auto", "envoy" or "in-process".
func startGateway(ctx context.Context, kind string, m mode, picker extprocpb.ExternalProcessorServer) (*gateway, error) {
	if kind == "in-process" {
		return startInProcess(m, picker)
	}
	bin, err := envoy.Find()
	switch {
	case err == nil:
		return startEnvoy(ctx, bin, m, picker)
	case kind == "auto":
		return startInProcess(m, picker)
	}
	return nil, err
}

// startEnvoy starts a real Envoy, and the picker as the grpc server that it calls.
func startEnvoy(ctx context.Context, bin string, m mode, picker extprocpb.ExternalProcessorServer) (*gateway, error) {
	version, err := envoy.Version(bin)
	if err != nil {
		return nil, err
	}
	server, addr, err := listenAndServe(picker)
	if err != nil {
		return nil, err
	}
	e, err := envoy.Start(ctx, bin, envoy.Config{
		ExtProc: []envoy.ExtProc{{
			Address:        addr.String(),
			Mode:           envoy.ProcessingMode{ResponseBody: envoy.BodyMode(m.body), ResponseTrailers: envoy.Send},
			MessageTimeout: messageTimeout,
		}},
		Upstream: envoy.Upstream{ByHeader: true},
	})
	if err != nil {
		server.Stop()
		return nil, err
	}
	return &gateway{name: "Envoy " + version, url: e.URL(), close: func() error {
		defer server.Stop()
		return e.Close()
	}}, nil
}

// startInProcess starts a reverse proxy that does with each request what Envoy's
// ext_proc filter does. It calls the picker directly, without grpc.
func startInProcess(m mode, picker extprocpb.ExternalProcessorServer) (*gateway, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	upstream := new(http.Transport)
	quiet := log.New(io.Discard, "", 0)
	server := &http.Server{
		Handler: &httputil.ReverseProxy{
			Rewrite: func(r *httputil.ProxyRequest) { r.Out.URL.Scheme, r.Out.URL.Host = "http", r.In.Host },
			Transport: &extproctest.Envoy{
				Server:   picker,
				Upstream: byHeader{upstream},
				Config: &filterpb.ExternalProcessor{
					ProcessingMode: &filterpb.ProcessingMode{
						ResponseBodyMode:    filterpb.ProcessingMode_BodySendMode(filterpb.ProcessingMode_BodySendMode_value[m.body]),
						ResponseTrailerMode: filterpb.ProcessingMode_SEND,
					},
					MessageTimeout: durationpb.New(messageTimeout),
				},
			},
			FlushInterval: -1, // at once
			ErrorLog:      quiet,
		},
		Protocols: newProtocols(),
		ErrorLog:  quiet,
	}
	server.Protocols.SetHTTP1(true)
	go server.Serve(l) // ends with server.Close
	return &gateway{name: "in process, which does what Envoy's ext_proc filter does", url: "http://" + l.Addr().String(), close: func() error {
		defer upstream.CloseIdleConnections()
		return server.Close()
	}}, nil
}

// byHeader sends each request to the endpoint that the picker has named.
type byHeader struct{ http.RoundTripper }

func (t byHeader) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.URL.Host = r.Header.Get(envoy.EndpointHeader)
	return t.RoundTripper.RoundTrip(r)
}

// newProtocols returns HTTP/2 without TLS.
func newProtocols() *http.Protocols {
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	return p
}
